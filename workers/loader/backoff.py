"""When what may pass is tried again. Pure.

Pauses double up to a limit, each drawn from its upper half so that a fleet does not come back in one moment; whenever
an attempt brought something, they begin anew. Without any for AWAY_LIMIT_S it is given up.
"""

FIRST_S, LONGEST_S, AWAY_LIMIT_S = 0.2, 5.0, 75.0


class Backoff:
    """`now` is monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._moved_at, self._progress, self._pause_s = now, 0, FIRST_S

    def failed(self, progress: int, now: float, chance: float) -> float | None:
        """The pause after an attempt, which got so far in all; None: give up. `chance`: drawn from [0, 1)."""
        if progress > self._progress:
            self._moved_at, self._pause_s = now, FIRST_S
        self._progress = progress
        if now - self._moved_at >= AWAY_LIMIT_S:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_S)
        return pause_s * (0.5 + 0.5 * chance)
