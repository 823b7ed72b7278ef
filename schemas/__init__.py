"""Every message, table row and topic, in msgspec structs without behaviour. `topics.py` is the map: read it first.

Rules that hold for every type here: a new field has a default, no field ever changes its type or meaning, unknown
fields are skipped by readers. Golden files under tests/schemas/golden are decoded by a test.
"""
