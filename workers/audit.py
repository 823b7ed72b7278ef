"""Compares leases with what lives: every lease and KV block must have a live holder, every sequence a lease. Pure.

A difference is an incident: told once, counted, and kept to be seen, never mended, for a lease that is taken from
somebody whom nobody knew of is how one customer's rows come to run with another's weights.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping

from schemas.engine import Leases
from schemas.reasons import Tier

log = logging.getLogger(__name__)


def of_files(tier: Tier, leases: Mapping[str, Collection[str]], live: Collection[str]) -> Iterator[str]:
    """Leases of the disk or RAM tier by content, and the holders that may have one."""
    for content_id, holders in leases.items():
        for holder in holders:
            if holder not in live:
                yield f"{tier}: {holder} holds {content_id} and is no more"


def of_slots(leases: Leases, attempts: Mapping[int, str]) -> Iterator[str]:
    """The engine's leases, and the attempts here: sequence -> content id."""
    for seq, content_id in leases.held.items():
        if seq not in attempts:
            yield f"gpu: sequence {seq} holds {content_id} and is no more"
        elif attempts[seq] != content_id:
            yield f"gpu: sequence {seq} holds {content_id} and is to run with {attempts[seq]}"
        elif seq not in leases.running:
            yield f"gpu: sequence {seq} holds {content_id} and does not run"
    for seq in leases.running:
        if seq not in leases.held:
            yield f"gpu: sequence {seq} runs without a lease"
    if leases.blocks and not attempts:
        yield f"gpu: {leases.blocks} KV blocks are held and nothing runs"


class Incidents:
    """`count`: all that were found; `last`: the newest one's words."""

    def __init__(self) -> None:
        self.count, self.last = 0, ""
        self._known: dict[str, set[str]] = {}

    def found(self, where: str, incidents: Iterable[str]) -> None:
        """All that an audit of `where` found; what the one before it found too is told already."""
        now, before = set(incidents), self._known.get(where, set())
        for incident in sorted(now - before):
            self.count, self.last = self.count + 1, incident
            log.error("incident: %s", incident)
        self._known[where] = now
