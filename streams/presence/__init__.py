"""Who holds which replica and gateway place, and who has fallen silent. Pure, but for `claim.py`."""
