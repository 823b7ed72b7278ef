"""Which replica takes a request: of the adapter's owners the one with fewer tokens in flight, else a spill. Pure.

Owners are the top `owners` replicas by rendezvous hash among those alive. When every owner is overloaded the request
spills to the least loaded replica; when all are, it is refused.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from streams.placement.rendezvous import OWNERS, ranked


@dataclass(frozen=True)
class Candidate:
    """A live replica. `load` and `capacity` are in tokens in flight."""

    replica: int
    incarnation: int
    load: int
    capacity: int


@dataclass(frozen=True)
class Route:
    replica: int
    incarnation: int
    spilled: bool


@dataclass(frozen=True)
class NoRoute:
    """`overloaded`: replicas live, but none has room. Otherwise there is none."""

    overloaded: bool


def route(
    adapter: str, candidates: Sequence[Candidate], cost: int, owners: int = OWNERS, avoid: Collection[int] = ()
) -> Route | NoRoute:
    """Chooses for one request of `cost` tokens. `adapter` empty: the base model, which every replica owns.

    `avoid`: places that have just failed this request; they are taken only when nothing else has room.
    """
    failed = set(avoid)
    for pool in ([c for c in candidates if c.replica not in failed], [c for c in candidates if c.replica in failed]):
        by_place = {c.replica: c for c in pool}
        order = [by_place[place] for place in ranked(adapter, by_place)]
        owning = order[:owners] if adapter else order
        for group, spilled in ((owning, False), (order, True)):
            # An idle replica takes any request: one that alone exceeds the capacity must not starve for ever.
            room = [c for c in group if c.load == 0 or c.load + cost <= c.capacity]
            if room:
                best = min(room, key=lambda c: c.load)  # ties go to the better owner: min keeps the first
                return Route(best.replica, best.incarnation, spilled)
    return NoRoute(overloaded=bool(candidates))
