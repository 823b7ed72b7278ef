"""What the next step computes: continuous batching with chunked prefill. Pure.

Owns the sequences from start to finish, and through them leases (slots.py) and KV blocks (kv_blocks.py). Order: first
come, first served, except that a sequence whose adapter is in no slot waits aside while others pass.

KV: a sequence is admitted when the tokens it has fit, and grows block by block. When blocks run out, the youngest
running sequence gives all of its own back and later reads its tokens again (a row's bits do not depend on that). The
oldest is never preempted and `fault` refuses what could not fit alone, so there is always progress.

Bounded waiting: while a load finds no slot to take, at most BLOCKED_PASSES adapter sequences that came later than the
one it is for are admitted, then none until it has one: requests for resident adapters cannot starve the others.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from itertools import takewhile

import msgspec

from schemas.engine import SequenceFinished, StartSequence, Token
from schemas.reasons import FinishReason
from workers.engine.kv_blocks import BLOCK_TOKENS, KvBlocks, OutOfBlocks, blocks_for
from workers.engine.sequence import Sequence, fault
from workers.engine.slots import NO_ADAPTER, Slots

BLOCKED_PASSES = 64


class Limits(msgspec.Struct, frozen=True):
    """`prompt_tokens_per_step` bounds the prefill of one step; decode rows come on top."""

    vocab_size: int
    context_length: int
    kv_tokens: int
    max_rows: int = 32
    prompt_tokens_per_step: int = 128


class Row(msgspec.Struct, frozen=True):
    """Part of one sequence in a step: its tokens [start, start + count). The last one is sampled from if `samples`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    blocks: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count]


class Failure(msgspec.Struct, frozen=True):
    """This row could not be computed; its neighbours could."""

    detail: str


Outcome = int | None | Failure  # the next token's id, nothing sampled, or a failure


class Scheduler:
    def __init__(self, limits: Limits, slots: Slots) -> None:
        self.limits = limits
        self._slots = slots
        self._blocks = KvBlocks(limits.kv_tokens // BLOCK_TOKENS)
        self._waiting: dict[int, Sequence] = {}  # in order of arrival
        self._running: dict[int, Sequence] = {}  # in order of arrival
        self._asked: set[str] = set()  # contents said to be missing and not answered yet
        self._blocked: list[str] = []  # contents whose load finds no slot, oldest need first
        self._passes = 0  # admissions past the first of them
        self._started = 0
        self._joined: list[int] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        return self._blocks.free

    def tokens_in_flight(self) -> int:
        return sum(s.in_flight for group in (self._waiting, self._running) for s in group.values())

    def start(self, start: StartSequence) -> SequenceFinished | None:
        """Takes a sequence, or says why it ends before it began."""
        if start.seq in self._waiting or start.seq in self._running:
            raise ValueError(f"sequence {start.seq} was started twice")
        self._started += 1
        sequence = Sequence(start, self._started, self.limits.context_length)
        kv_tokens = self._blocks.total * BLOCK_TOKENS
        if detail := fault(start, self.limits.vocab_size, kv_tokens, self.limits.context_length):
            return self._finished(sequence, FinishReason.ERROR, detail)
        if reason := sequence.ending():
            return self._finished(sequence, reason, "")
        self._waiting[start.seq] = sequence
        return None

    def cancel(self, seq: int, reason: FinishReason) -> SequenceFinished | None:
        """Ends a sequence in any state; None if it has ended already."""
        sequence = self._running.get(seq) or self._waiting.get(seq)
        return None if sequence is None else self._finished(sequence, reason, "")

    def fail_adapter(self, content_id: str, detail: str) -> list[SequenceFinished]:
        """Ends every sequence that waits for this content."""
        self._asked.discard(content_id)
        waiting = [s for s in self._waiting.values() if s.content_id == content_id]
        return [self._finished(s, FinishReason.LOAD_FAILED, detail) for s in waiting]

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

    def joined(self) -> list[int]:
        """Sequences admitted since this was last asked; one that was preempted comes again."""
        joined, self._joined = self._joined, []
        return joined

    def plan(self) -> list[Row]:
        """The rows of the next step: every decoding sequence, and prompt chunks up to the budget, oldest first."""
        self._make_room()
        self._admit()
        rows, budget = [], self.limits.prompt_tokens_per_step
        for sequence in self._running.values():
            left = len(sequence.tokens) - sequence.computed
            decoding = sequence.computed >= sequence.known
            count = left if decoding else min(left, budget)
            if count:
                budget -= 0 if decoding else count
                blocks = self._blocks.held(sequence.seq)
                rows.append(Row(sequence, sequence.computed, count, count == left, blocks))
        return rows

    def settle(self, rows: Listing[Row], outcomes: Listing[Outcome]) -> tuple[list[Token], list[SequenceFinished]]:
        """Takes in what a step computed: new tokens, and the sequences that ended with it."""
        tokens: list[Token] = []
        finished: list[SequenceFinished] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            sequence = row.sequence
            if isinstance(outcome, Failure):
                finished.append(self._finished(sequence, FinishReason.ERROR, outcome.detail))
                continue
            sequence.computed = row.start + row.count
            if outcome is None:
                continue
            tokens.append(Token(sequence.seq, sequence.length, outcome))
            sequence.tokens.append(outcome)
            if reason := sequence.ending():
                finished.append(self._finished(sequence, reason, ""))
        return tokens, finished

    def _make_room(self) -> None:
        """Every running sequence gets blocks for all its tokens; the youngest ones give way if need be."""
        for sequence in list(self._running.values()):
            while sequence.seq in self._running:
                try:
                    self._blocks.grow(sequence.seq, len(sequence.tokens))
                    break
                except OutOfBlocks:
                    self._preempt(next(reversed(self._running.values())))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.restart()
        self._waiting = _by_age(self._waiting | {sequence.seq: sequence})  # back to where it stood

    def _admit(self) -> None:
        overtaking = False  # past the first sequence whose load finds no slot
        for sequence in list(self._waiting.values()):
            if len(self._running) >= self.limits.max_rows:
                break
            if sequence.content_id and not self._slots.holds(sequence.content_id):
                overtaking = overtaking or sequence.content_id in self._blocked
                continue
            if sequence.content_id and overtaking and self._passes >= BLOCKED_PASSES:
                continue
            # One block of headroom for each running sequence, or the next steps would preempt what this one admits.
            if self._running and blocks_for(len(sequence.tokens)) + len(self._running) > self._blocks.free:
                break
            self._passes += bool(sequence.content_id) and overtaking
            del self._waiting[sequence.seq]
            self._blocks.grow(sequence.seq, len(sequence.tokens))
            if sequence.content_id:
                sequence.lease = self._slots.lease(sequence.seq, sequence.content_id)
            self._running[sequence.seq] = sequence
            self._joined.append(sequence.seq)
        self._running = _by_age(self._running)

    def _wanted(self) -> dict[str, None]:
        """Contents that sequences wait for, oldest need first."""
        return dict.fromkeys(s.content_id for s in self._waiting.values() if s.content_id)

    def _finished(self, sequence: Sequence, reason: FinishReason, detail: str) -> SequenceFinished:
        lease = sequence.lease
        self._leave(sequence)
        return SequenceFinished(sequence.seq, sequence.length, reason, detail, lease.slot, lease.epoch)

    def _leave(self, sequence: Sequence) -> None:
        """The one way out of the batch or the queue: lease and blocks go back."""
        self._waiting.pop(sequence.seq, None)
        self._running.pop(sequence.seq, None)
        self._slots.release(sequence.seq)
        self._blocks.release(sequence.seq)
        sequence.lease = NO_ADAPTER


def _by_age(sequences: dict[int, Sequence]) -> dict[int, Sequence]:
    return dict(sorted(sequences.items(), key=lambda item: item[1].age))
