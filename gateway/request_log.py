"""One JSON line on stdout for each accepted request's end: its row of ClickHouse, without a word of what was said.

A row has what an operator may know: ids, customer, adapter, content id, tier, replica, attempts, outcome, times.
"""

import logging
import sys

import msgspec

from schemas.stats import RequestFinished

LOGGER = logging.getLogger("lorafleet.requests")


def set_up() -> None:
    """Lines of their own, nothing before or behind the JSON."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def note(row: RequestFinished) -> None:
    LOGGER.info("%s", msgspec.json.encode(row).decode())
