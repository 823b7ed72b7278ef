"""What the next step computes: continuous batching with chunked prefill, fair among customers. Pure.

Owns the sequences from start to finish, and through them leases (slots.py) and KV blocks (kv_blocks.py). Among
customers the one with the smallest counter (fairness.py) goes first, to a place in the batch as to the step's prompt
tokens; within a customer the oldest does (waiting.py). For a place the prompts of its running sequences count as read,
or an empty batch would go whole to one customer.

A step computes every decoding sequence and at most `prompt_tokens_per_step` prompt tokens. Decode rows come on top:
they never wait, and what a prompt can add to the time of their step is the same however many they are, while prompts
are read as fast beside a full batch as beside an empty one.

KV: a sequence is admitted when the tokens it has fit, and grows block by block. When blocks run out, the youngest
running sequence of the customer with the largest counter gives its own back and later reads its tokens again, most of
them from the prefix cache (a row's bits do not depend on that). The oldest is never preempted and `fault` refuses what
could not fit alone, so there is always progress.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listing
from contextlib import contextmanager

import msgspec

from schemas.engine import SequenceFinished, StartSequence, Token
from schemas.reasons import FinishReason
from schemas.tokens import Logprobs
from workers.engine.fairness import Fairness, cost
from workers.engine.kv_blocks import BLOCK_TOKENS, LENT, KvBlocks, OutOfBlocks
from workers.engine.sequence import Sequence, fault
from workers.engine.slots import NO_ADAPTER, Slots
from workers.engine.waiting import Waiting


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


class Scored(msgspec.Struct, frozen=True):
    """The next token's id, and how likely it was, for those who asked."""

    id: int
    logprobs: Logprobs


Outcome = int | Scored | None | Failure  # the next token's id, nothing sampled, or a failure


class Scheduler:
    def __init__(self, limits: Limits, slots: Slots) -> None:
        self._slots = slots
        self._blocks = KvBlocks(limits.kv_tokens // BLOCK_TOKENS)
        # What is promised to others: the positions that whole blocks have.
        self.limits = msgspec.structs.replace(limits, kv_tokens=self._blocks.total * BLOCK_TOKENS)
        self._fairness = Fairness()
        self._waiting = Waiting(slots)
        self._running: dict[int, Sequence] = {}  # in order of arrival
        self._started = 0
        self._joined: list[int] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def blocks_in_use(self) -> int:
        """KV blocks that sequences hold."""
        return self._blocks.in_use

    @property
    def free_blocks(self) -> int:
        """KV blocks that may be taken; those that hold known prefixes count."""
        return self._blocks.free

    def adapted(self) -> list[int]:
        """The running sequences that have an adapter."""
        return [seq for seq, sequence in self._running.items() if sequence.content_id]

    def tokens_in_flight(self) -> int:
        return sum(s.in_flight for group in (self._waiting, self._running.values()) for s in group)

    def start(self, start: StartSequence) -> SequenceFinished | None:
        """Takes a sequence, or says why it ends before it began."""
        if start.seq in self._running or self._waiting.get(start.seq):
            raise ValueError(f"sequence {start.seq} was started twice")
        self._started += 1
        merged = self._slots.merged.content_id
        sequence = Sequence(start, self._started, self.limits.context_length, bool(merged))
        if detail := fault(start, self.limits.vocab_size, self.limits.kv_tokens, self.limits.context_length):
            return self._finished(sequence, FinishReason.ERROR, detail)
        if merged and start.content_id != merged:
            what = f"content_id: {start.content_id or 'the base'} cannot run here: {merged} is merged into the weights"
            return self._finished(sequence, FinishReason.ERROR, f"{what}; send it to another replica, or Unmerge first")
        if reason := sequence.ending():
            return self._finished(sequence, reason, "")
        self._waiting.add(sequence)
        return None

    def cancel(self, seq: int, reason: FinishReason) -> SequenceFinished | None:
        """Ends a sequence in any state; None if it has ended already."""
        sequence = self._running.get(seq) or self._waiting.get(seq)
        return None if sequence is None else self._finished(sequence, reason, "")

    def fail_adapter(self, content_id: str, detail: str) -> list[SequenceFinished]:
        """Ends every sequence that waits for this content."""
        self._waiting.answered(content_id)
        waiting = [s for s in self._waiting if s.content_id == content_id]
        return [self._finished(s, FinishReason.LOAD_FAILED, detail) for s in waiting]

    @contextmanager
    def lent(self, tokens: int) -> Iterator[list[int]]:
        """KV blocks for `tokens` positions that are no sequence's. Raises OutOfBlocks."""
        try:
            yield self._blocks.lend(tokens)
        finally:
            self._blocks.release(LENT)

    def missing(self) -> list[str]:
        """Contents that sequences wait for and nobody was asked for yet, in order of need; they count as asked now."""
        return self._waiting.missing()

    def answered(self, content_id: str) -> None:
        """The load ended, well or badly: from here on the content may be said to be missing again."""
        self._waiting.answered(content_id)

    def by_need(self, contents: Iterable[str]) -> list[str]:
        """The contents in the order in which waiting sequences need them; those that nobody waits for come last."""
        return self._waiting.by_need(contents)

    def spared(self, content_id: str) -> set[str]:
        """Contents that a load of `content_id` may not evict: those that an older waiting sequence needs."""
        return self._waiting.spared(content_id)

    def loads_blocked(self, contents: list[str]) -> None:
        """Says which loads, oldest need first, wait because no slot may be taken."""
        self._waiting.loads_blocked(contents)

    def joined(self) -> list[int]:
        """Sequences admitted since this was last asked; one that was preempted comes again."""
        joined, self._joined = self._joined, []
        return joined

    def plan(self, ready: Callable[[Sequence], bool] = lambda _: True) -> list[Row]:
        """The rows of the next step, oldest first: every decoding sequence, and prompt chunks up to the budget.

        `ready` is asked for each waiting sequence: whether the runner can compute it. Others pass one that is not.
        """
        self._make_room()
        servable = self._waiting.servable(ready)
        self._fairness.want(servable.keys() | {s.customer for s in self._running.values() if s.reading})
        self._admit(servable)
        chunks = self._chunks()
        rows = []
        for sequence in self._running.values():
            if count := chunks.get(sequence.seq, 0) if sequence.reading else sequence.left:
                blocks = list(self._blocks.held(sequence.seq))
                rows.append(Row(sequence, sequence.computed, count, count == sequence.left, blocks))
        return rows

    def settle(self, rows: Listing[Row], outcomes: Listing[Outcome]) -> tuple[list[Token], list[SequenceFinished]]:
        """Takes in what a step computed: new tokens, and the sequences that ended with it."""
        tokens: list[Token] = []
        finished: list[SequenceFinished] = []
        # Failures first: no other row may take over a block of a sequence that fails in the same step.
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._blocks.discard(row.sequence.seq)
                finished.append(self._finished(row.sequence, FinishReason.ERROR, outcome.detail))
        for row, outcome in zip(rows, outcomes, strict=True):
            sequence, computed = row.sequence, row.start + row.count
            self._fairness.charge(
                sequence.customer, sequence.weight, sequence.pay(computed), int(isinstance(outcome, int | Scored))
            )
            if isinstance(outcome, Failure):
                continue
            sequence.computed = computed
            self._blocks.computed(sequence.seq, sequence.tokens, computed)
            if outcome is None:
                continue
            token, scores = (outcome.id, outcome.logprobs) if isinstance(outcome, Scored) else (outcome, None)
            tokens.append(Token(sequence.seq, sequence.length, token, scores))
            sequence.tokens.append(token)
            if reason := sequence.ending():
                finished.append(self._finished(sequence, reason, ""))
        return tokens, finished

    def _make_room(self) -> None:
        """Every running sequence gets blocks for all its tokens; others give way if need be."""
        for sequence in list(self._running.values()):
            while sequence.seq in self._running:
                try:
                    self._blocks.grow(sequence.seq, len(sequence.tokens))
                    break
                except OutOfBlocks:
                    self._preempt()

    def _preempt(self) -> None:
        """The youngest of the customer with the largest counter gives way; the oldest of all never does."""
        others = list(self._running.values())[1:]
        sequence = max(others, key=lambda s: (self._fairness.counter(s.customer), s.age))
        self._leave(sequence)
        sequence.restart()
        self._waiting.add(sequence)

    def _admit(self, servable: dict[str, deque[Sequence]]) -> None:
        """Fills free places, each from the customer that got least. The first that finds no room is not passed."""
        due = defaultdict[str, float](float)  # prompt tokens still to be paid, over the weight
        for sequence in self._running.values():
            due[sequence.customer] += cost(sequence.weight, sequence.unpaid)
        while servable and len(self._running) < self.limits.max_rows:
            customer = min(servable, key=lambda c: (self._fairness.counter(c) + due[c], servable[c][0].age))
            sequence = servable[customer].popleft()
            if not servable[customer]:
                del servable[customer]
            if not self._waiting.may_pass(sequence):
                continue
            # One block of headroom for each running sequence, or the next steps would preempt what this one admits.
            cached = self._blocks.admit(sequence.seq, sequence.space(), sequence.tokens, len(self._running))
            if cached is None:
                break
            self._waiting.admitted(sequence)
            sequence.skip(cached)
            due[customer] += cost(sequence.weight, sequence.unpaid)
            if sequence.content_id:
                sequence.lease = self._slots.lease(sequence.seq, sequence.content_id)
            self._running[sequence.seq] = sequence
            self._joined.append(sequence.seq)
        self._running = dict(sorted(self._running.items(), key=lambda item: item[1].age))

    def _chunks(self) -> dict[int, int]:
        """Sequence -> prompt tokens that it reads in this step, each from the customer that got least."""
        reading: dict[str, deque[Sequence]] = {}
        for sequence in self._running.values():
            if sequence.reading:
                reading.setdefault(sequence.customer, deque()).append(sequence)
        chunks: dict[int, int] = {}
        given = defaultdict[str, float](float)  # in this step, over the weight
        budget = self.limits.prompt_tokens_per_step
        while reading and budget:
            customer = min(reading, key=lambda c: (self._fairness.counter(c) + given[c], reading[c][0].age))
            sequence = reading[customer].popleft()
            if not reading[customer]:
                del reading[customer]
            sequence.skip(self._blocks.skip(sequence.seq, sequence.tokens, sequence.computed))
            count = min(sequence.left, budget)
            chunks[sequence.seq] = count
            budget -= count
            given[customer] += cost(sequence.weight, count)
        return chunks

    def _finished(self, sequence: Sequence, reason: FinishReason, detail: str) -> SequenceFinished:
        lease = sequence.lease
        self._leave(sequence)
        return SequenceFinished(sequence.seq, sequence.length, reason, detail, lease.slot, lease.epoch, sequence.cached)

    def _leave(self, sequence: Sequence) -> None:
        """The one way out of the batch or the queue: lease and blocks go back."""
        self._waiting.remove(sequence.seq)
        self._running.pop(sequence.seq, None)
        self._slots.release(sequence.seq)
        self._blocks.release(sequence.seq)
        sequence.lease = NO_ADAPTER
