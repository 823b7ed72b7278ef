"""The sequences that have no place in the batch, and the adapters that they wait for. Pure.

Within a customer first come, first served, except that a sequence whose adapter is in no slot waits aside while others
pass. Among customers the scheduler chooses.

Bounded waiting: while a load finds no slot to take, at most BLOCKED_PASSES adapter sequences that came later than the
one it is for are admitted, then none until it has one: requests for resident adapters cannot starve the others.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from workers.engine.sequence import Sequence
from workers.engine.slots import Slots

BLOCKED_PASSES = 64


class Waiting:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._of: dict[int, Sequence] = {}  # in order of arrival
        self._asked: set[str] = set()  # contents said to be missing and not answered yet
        self._blocked: list[str] = []  # contents whose load finds no slot, oldest need first
        self._passes = 0  # admissions past the first of them

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival."""
        return iter(self._of.values())

    def get(self, seq: int) -> Sequence | None:
        return self._of.get(seq)

    def add(self, sequence: Sequence) -> None:
        """A new sequence at the end, one that was preempted back to where it stood."""
        last = next(reversed(self._of.values()), None)
        self._of[sequence.seq] = sequence
        if last is not None and last.age > sequence.age:
            self._of = dict(sorted(self._of.items(), key=lambda item: item[1].age))

    def remove(self, seq: int) -> None:
        self._of.pop(seq, None)

    def servable(self, ready: Callable[[Sequence], bool]) -> dict[str, deque[Sequence]]:
        """Each customer's sequences that could run now, oldest first. `ready`: what else than a slot they wait for."""
        lines: dict[str, deque[Sequence]] = {}
        for sequence in self._of.values():
            if ready(sequence) and (not sequence.content_id or self._slots.holds(sequence.content_id)):
                lines.setdefault(sequence.customer, deque()).append(sequence)
        return lines

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether the bound on admissions past a blocked load lets this one in."""
        return self._passes < BLOCKED_PASSES or not self._passing(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """It got a place in the batch."""
        self._passes += self._passing(sequence)
        del self._of[sequence.seq]

    def missing(self) -> list[str]:
        """Contents that sequences wait for and nobody was asked for yet, in order of need; they count as asked now."""
        news = [c for c in self._wanted() if c not in self._asked and not self._slots.holds(c)]
        self._asked.update(news)
        return news

    def answered(self, content_id: str) -> None:
        """The load ended, well or badly: from here on the content may be said to be missing again."""
        self._asked.discard(content_id)

    def by_need(self, contents: Iterable[str]) -> list[str]:
        """The contents in the order in which waiting sequences need them; those that nobody waits for come last."""
        need = {content: order for order, content in enumerate(self._wanted())}
        return sorted(contents, key=lambda content: need.get(content, len(need)))

    def spared(self, content_id: str) -> set[str]:
        """Contents that a load of `content_id` may not evict: those that an older waiting sequence needs.

        Without this order two adapters whose sequences wait for a row could evict each other for ever.
        """
        return set(takewhile(lambda wanted: wanted != content_id, self._wanted()))

    def loads_blocked(self, contents: list[str]) -> None:
        """Says which loads, oldest need first, wait because no slot may be taken."""
        if contents[:1] != self._blocked[:1]:
            self._passes = 0
        self._blocked = contents

    def _passing(self, sequence: Sequence) -> bool:
        """An adapter sequence that came later than the first whose load finds no slot."""
        if not (sequence.content_id and self._blocked):
            return False
        blocked = set(self._blocked)
        return next((s.age < sequence.age for s in self._of.values() if s.content_id in blocked), False)

    def _wanted(self) -> dict[str, None]:
        """Contents that sequences wait for, oldest need first."""
        return dict.fromkeys(s.content_id for s in self._of.values() if s.content_id)
