"""Says when loads chase evictions in a tier: what was evicted is needed again a moment later. Pure.

A load that brings back what left the tier within WINDOW_S is a chase. The signal is raised when the last window has at
least RAISED chases and they are at least half of its loads; it falls when there are no more than FALLEN. What would
make it worse (pulling adapters ahead of requests) asks it first; what requests need goes on: they would only wait.
"""

import logging
from collections import deque

from schemas.reasons import Tier
from schemas.stats import CacheEvent

log = logging.getLogger(__name__)

WINDOW_S = 60.0
RAISED, FALLEN = 10, 3


class _Chases:
    """One tier's. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._gone: dict[str, float] = {}  # content id -> when it was evicted, oldest first
        self._loads: deque[tuple[float, bool]] = deque()  # when, and whether it was a chase
        self._raised = False

    def evicted(self, content_id: str, now: float) -> None:
        self._gone.pop(content_id, None)
        self._gone[content_id] = now

    def loaded(self, content_id: str, now: float) -> None:
        self._loads.append((now, now - self._gone.pop(content_id, -WINDOW_S) < WINDOW_S))

    def raised(self, now: float) -> bool:
        while self._loads and now - self._loads[0][0] > WINDOW_S:
            self._loads.popleft()
        while self._gone and now - next(iter(self._gone.values())) > WINDOW_S:
            del self._gone[next(iter(self._gone))]
        chases = sum(chase for _, chase in self._loads)
        if self._raised:
            self._raised = chases > FALLEN
        else:
            self._raised = chases >= RAISED and 2 * chases >= len(self._loads)
        return self._raised


class Governor:
    """Fed with every cache event of a worker."""

    def __init__(self) -> None:
        self._tiers = {tier: _Chases() for tier in (Tier.GPU, Tier.RAM, Tier.DISK)}
        self._told: list[Tier] = []

    def event(self, event: CacheEvent, now: float) -> None:
        match event.event:
            case "load":
                self._tiers[event.tier].loaded(event.content_id, now)
            case "evict":
                self._tiers[event.tier].evicted(event.content_id, now)

    def thrashing(self, now: float) -> list[Tier]:
        """The tiers in which loads chase evictions. A change is logged."""
        found = [tier for tier, chases in self._tiers.items() if chases.raised(now)]
        if found != self._told:
            log.warning("loads chase evictions in: %s", ", ".join(found) or "no tier any more")
            self._told = found
        return found
