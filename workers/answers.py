"""What a beat says of commands and of loads that failed. Pure; owns both lists, which are bounded.

Whoever waits for an answer reads every beat, and each has the last KEPT, so that none is missed while fewer come within
a beat. A crash forgets them: who waits sees another incarnation, and asks anew.
"""

from collections import deque
from collections.abc import Callable

from schemas.replicas import Answer, Answered, FailedLoad

KEPT, FAILURES_KEPT = 64, 16
_LONGEST = 400  # characters of a reason


class Answers:
    """`hurry` makes the next beat go out now."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry
        self._last: deque[Answer] = deque(maxlen=KEPT)

    def give(self, command_id: str, outcome: Answered, reason: str = "", lasting: bool = False) -> None:
        self._last.append(Answer(command_id, outcome, reason[:_LONGEST], lasting))
        self._hurry()

    def told(self) -> list[Answer]:
        return list(self._last)


class FailedLoads:
    def __init__(self) -> None:
        self._of: dict[str, FailedLoad] = {}  # by adapter, the newest last

    def failed(self, adapter_id: str, reason: str, at_unix_ms: int, lasting: bool) -> None:
        self._of.pop(adapter_id, None)
        self._of[adapter_id] = FailedLoad(adapter_id, reason[:_LONGEST], at_unix_ms, lasting)
        if len(self._of) > FAILURES_KEPT:
            del self._of[next(iter(self._of))]

    def loaded(self, adapter_id: str) -> None:
        """It came after all."""
        self._of.pop(adapter_id, None)

    def told(self) -> list[FailedLoad]:
        """The newest first."""
        return list(reversed(self._of.values()))
