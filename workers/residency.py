"""Which adapters the engine holds, as its events tell, and how hard they chase each other. Pure.

Ordering relied on: the engine's events. A crash of the engine empties it, and ends the worker too.
"""

from collections import deque

from schemas.engine import SlotEvicted, SlotLoaded

WINDOW_S = 60.0


class Residency:
    """`now` is monotonic seconds."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}  # content id -> bytes of its slot, least recently used first
        self._loads: deque[float] = deque()
        self._evictions: deque[float] = deque()

    def holds(self, content_id: str) -> bool:
        return content_id in self._used

    def contents(self) -> list[str]:
        """Content ids, most recently used first."""
        return list(reversed(self._used))

    @property
    def bytes(self) -> int:
        """Of all slots that are filled."""
        return sum(self._used.values())

    def use(self, content_id: str) -> None:
        """An attempt runs with it."""
        if content_id in self._used:
            self._used[content_id] = self._used.pop(content_id)

    def loaded(self, event: SlotLoaded, now: float) -> None:
        """Bytes 0: it was there already."""
        if event.bytes:
            self._loads.append(now)
        self._used[event.content_id] = event.bytes or self._used.pop(event.content_id, 0)

    def evicted(self, event: SlotEvicted, now: float) -> int:
        """The bytes it had; slot 0: it was in none."""
        if event.slot:
            self._evictions.append(now)
        return self._used.pop(event.content_id, 0)

    def per_minute(self, now: float) -> tuple[float, float]:
        """Loads and evictions in the last WINDOW_S, per minute."""
        for times in (self._loads, self._evictions):
            while times and now - times[0] > WINDOW_S:
                times.popleft()
        return len(self._loads) * 60 / WINDOW_S, len(self._evictions) * 60 / WINDOW_S
