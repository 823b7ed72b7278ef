"""Where a user's things are kept that are made once and outlive every checkout and every stack."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """LORAFLEET_CACHE, else lorafleet/ in the user's cache folder. Not created here."""
    if chosen := os.environ.get("LORAFLEET_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorafleet"
