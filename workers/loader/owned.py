"""Which adapters this replica owns, and in which order they are worth having. Pure.

Owners are the same as the gateways': the top ones by rendezvous hash among the replicas that may be given work. A
change of those counts once it has stood for SETTLED_S: a replica that restarts must not make the others pull what
comes back to it.
"""

from collections.abc import Iterable, Mapping, Sequence

from schemas.adapters import AdapterRecord
from schemas.placement import OwnerPlan
from streams.placement.placements import owners_of

SETTLED_S = 5.0
HALF_LIFE_S = 600.0


class Settled:
    """The live replicas, as they were for SETTLED_S at least. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._seen: frozenset[int] = frozenset()
        self._since = 0.0
        self.value: frozenset[int] = frozenset()

    def see(self, live: frozenset[int], now: float) -> frozenset[int]:
        if live != self._seen:
            self._seen, self._since = live, now
        elif live != self.value and now - self._since >= SETTLED_S:
            self.value = live
        return self.value


class Usage:
    """How often each content was asked for here, of late. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._scores: dict[str, tuple[float, float]] = {}  # content id -> score, as of when

    def use(self, content_id: str, now: float) -> None:
        self._scores[content_id] = (self.score(content_id, now) + 1, now)

    def score(self, content_id: str, now: float) -> float:
        """Requests, each half as much after every HALF_LIFE_S."""
        score, then = self._scores.get(content_id, (0.0, now))
        return float(score * 0.5 ** ((now - then) / HALF_LIFE_S))

    def used(self, now: float) -> list[str]:
        """What was asked for, the least first. What was not for long is forgotten."""
        scores = {content_id: self.score(content_id, now) for content_id in self._scores}
        self._scores = {content_id: self._scores[content_id] for content_id, score in scores.items() if score > 0.01}
        return sorted(self._scores, key=lambda content_id: scores[content_id])


def owns(replica: int, adapter_id: str, live: frozenset[int], plan: OwnerPlan | None) -> bool:
    """Whether `replica` is among the adapter's owners."""
    return replica in owners_of(adapter_id, live, plan)


def most_used_first(
    records: Iterable[AdapterRecord],
    here: Mapping[str, float],
    fleet: Mapping[str, float],
    recent: Sequence[str],
) -> list[AdapterRecord]:
    """`here`: requests by content id in this life; `fleet`: requests by adapter id, of the whole fleet; `recent`: the
    disk's contents, the most recently used first: what an earlier life knew.
    """
    place = {content_id: at for at, content_id in enumerate(recent)}

    def worth(record: AdapterRecord) -> tuple[float, float, int, str]:
        content_id = record.content_id
        return (
            -here.get(content_id, 0.0),
            -fleet.get(record.adapter_id, 0.0),
            place.get(content_id, len(place)),
            record.adapter_id,
        )

    return sorted(records, key=worth)
