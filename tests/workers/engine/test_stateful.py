"""10,000 random steps of scheduler, KV blocks and slots; the runner knows what each KV position was computed from.

Starts (prompts share prefixes, customers share prompts, some are re-driven), cancels in every state, loads, evictions,
unloads, failed adapters, failing rows, preemptions and prefix hits. After every step:

- a block's count of holders is the number of running sequences that hold it, and no sequence holds it twice;
- used, cached and empty blocks make up the total; waiting sequences hold nothing;
- a block with several holders is full and computed in each, at the same place, for the same customer and content;
- a row reads only positions that were computed from its own customer, content and tokens, none that a failed sequence
  left behind, and none that another row writes in the same step; what it writes is its own alone;
- leases are the running sequences with adapters, and each row's slot holds its filling;
- a sequence is admitted before no older one of its customer that could run, and rows stay within their limits;
- the tokens in flight are those of the unfinished sequences.

While two customers both want service all the time, what they get differs by the bound of fairness.py's paper. The
oldest running sequence is never preempted. At the end every sequence has ended once, with the tokens it gets alone, and
after a rest nothing is leased or held.
"""

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from schemas.engine import (
    CancelSequence,
    Event,
    FailAdapter,
    LoadSlot,
    Missing,
    SlotEvicted,
    StartSequence,
    Step,
    UnloadSlot,
)
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from tests.workers.engine.tiny import NeverMerged
from workers.engine.engine import Engine
from workers.engine.fairness import INPUT_COST, OUTPUT_COST
from workers.engine.kv_blocks import BLOCK_TOKENS, blocks_for
from workers.engine.runner import Model, Opened, Stamps
from workers.engine.scheduler import Failure, Limits, Outcome, Row, Scheduler
from workers.engine.slots import Lease, Slots

SEEDS, STEPS = 10, 1000
CUSTOMERS, CONTENTS = ("x", "y", "z"), ("", "a", "b", "c", "d")
KV_BLOCKS, ROWS, PROMPT_TOKENS, SLOTS = 16, 6, 24, 2
LONGEST_PROMPT, LONGEST_OUTPUT = 60, 90
BOUND = 2 * max(INPUT_COST * LONGEST_PROMPT, OUTPUT_COST * KV_BLOCKS * BLOCK_TOKENS)
WEIGHTS = {"x": 1.0, "y": 2.0, "z": 1.0}
SPOILED = -1


class Chains:
    """Numbers for (customer, content, tokens up to here): equal only if all of it is."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def after(self, before: object, token: int) -> int:
        return self._numbers.setdefault((before, token), len(self._numbers))

    def of(self, customer: str, content: str, tokens: Sequence[int]) -> list[int]:
        chain: list[int] = []
        for token in tokens:
            chain.append(self.after(chain[-1] if chain else (customer, content), token))
        return chain

    def token(self, number: int) -> int:
        """What follows. Two kinds of tokens, so that outputs meet too."""
        return number * 2654435761 % 7 % 2


class Knowing(NeverMerged):
    """A runner whose KV cache holds, at each position, the chain that it was computed from."""

    def __init__(self, draw: random.Random) -> None:
        self.model = Model("h", "knowing", 10_000, 10)
        self.chains = Chains()
        self.kv = [SPOILED] * (KV_BLOCKS * BLOCK_TOKENS)
        self.distrusted: dict[int, set[int]] = {}  # block of a failed sequence -> who shared it then
        self.stamps = Stamps()
        self.scheduler: Scheduler
        self.preempted = self.hits = self.failed = 0
        self._draw = draw
        self._chain: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}  # sequence -> prompt tokens that were read
        self.service = dict.fromkeys(CUSTOMERS, 0.0)

    def open(self, content_id: str, path: Path) -> Opened:
        def copy(filling: Lease) -> int:
            self.stamps.write(filling)
            return 1

        return Opened(0, copy)

    def clear(self, slot: int) -> None:
        self.stamps.erase(slot)

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        self._check_plan(rows)
        writers: dict[int, int] = {}
        for row in rows:
            for block in row.blocks[row.start // BLOCK_TOKENS : blocks_for(row.start + row.count)]:
                assert writers.setdefault(block, row.sequence.seq) == row.sequence.seq, "two rows write one block"
                assert self.scheduler._blocks.holders(block) == 1, "a block that is written is shared"
        for row in rows:
            self._read(row, writers)
        return [self._write(row) for row in rows]

    def _check_plan(self, rows: Sequence[Row]) -> None:
        assert len(rows) <= self.scheduler.running <= ROWS
        assert sum(row.count for row in rows if row.sequence.reading) <= PROMPT_TOKENS
        assert all(row.count == 1 for row in rows if not row.sequence.reading)
        for row in rows:
            assert self.stamps.mismatch(row) == ""
            assert row.start == row.sequence.computed
        running = list(self.scheduler._running.values())
        joined = set(self.scheduler._joined)
        for waiting in self.scheduler._waiting:
            resident = not waiting.content_id or self.scheduler._slots.holds(waiting.content_id)
            if resident and self.scheduler._waiting.may_pass(waiting):
                passed = [s for s in running if s.seq in joined and s.customer == waiting.customer]
                assert all(s.age < waiting.age for s in passed), "a younger one of its customer was admitted before"

    def _read(self, row: Row, writers: dict[int, int]) -> None:
        sequence = row.sequence
        chain = self._chain.setdefault(sequence.seq, [])
        for token in sequence.tokens[len(chain) :]:
            chain.append(self.chains.after(chain[-1] if chain else (sequence.customer, sequence.content_id), token))
        seen = [self.kv[block * BLOCK_TOKENS + at] for block in row.blocks for at in range(BLOCK_TOKENS)]
        assert seen[: row.start] == chain[: row.start], "a row reads what is not its own prefix"
        for block in row.blocks[: row.start // BLOCK_TOKENS]:
            assert writers.get(block) in (None, sequence.seq), "a row reads what another writes in this step"
            assert sequence.seq in self.distrusted.get(block, {sequence.seq}), "a failed sequence's block was kept"

    def _write(self, row: Row) -> Outcome:
        sequence, chain = row.sequence, self._chain[row.sequence.seq]
        end = row.start + row.count
        known = self._seen.get(sequence.seq, 0)
        self._seen[sequence.seq] = max(known, min(end, sequence.given))
        read = max(0, min(end, sequence.given) - max(known, row.start))
        self.service[sequence.customer] += INPUT_COST * read / sequence.weight
        fails = self._draw.random() < 0.004
        for position in range(row.start, end):
            block, at = row.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            if at == 0:
                self.distrusted.pop(block, None)
            self.kv[block * BLOCK_TOKENS + at] = SPOILED if fails else chain[position]
        if fails:
            self.failed += 1
            for block in row.blocks:
                self.distrusted[block] = {
                    s.seq for s in self.scheduler._running.values() if block in self.scheduler._blocks.held(s.seq)
                }
            return Failure("spoiled")
        if not row.samples:
            return None
        self.service[sequence.customer] += OUTPUT_COST / sequence.weight
        return self.chains.token(chain[-1])


class Fleet:
    """One engine, the worker's half of the protocol, and what must come out."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.runner = Knowing(self.draw)
        self.slots = Slots(SLOTS)
        limits = Limits(10, 10_000, KV_BLOCKS * BLOCK_TOKENS, ROWS, PROMPT_TOKENS)
        self.scheduler = self.runner.scheduler = Scheduler(limits, self.slots)
        self.events: list[Event] = []
        self.engine = Engine(self.scheduler, self.slots, self.runner, self.events.append, lambda: 0.0)
        self.starts: dict[int, StartSequence] = {}
        self.open: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.answers: list[tuple[int, str]] = []  # when, for which content
        self.steps = self.evictions = 0
        self.since: dict[tuple[str, str], float] = {}  # pairs that want all the time, and their difference at first
        self.prompts = [[self.draw.randint(0, 1) for _ in range(LONGEST_PROMPT)] for _ in range(2)]

    def start(self, kind: float) -> None:
        seq = len(self.starts)
        cut = self.draw.choice((1, 15, 16, 17, 33, 50, 50, LONGEST_PROMPT))
        tail = [self.draw.randint(0, 1) for _ in range(self.draw.randint(0, min(9, LONGEST_PROMPT - cut)))]
        prompt = self.draw.choice(self.prompts)[:cut] + tail
        customer = self.draw.choice(CUSTOMERS if self.draw.random() < 0.5 else CUSTOMERS[:1])
        content = self.draw.choice(CONTENTS[:2] if self.draw.random() < 0.6 else CONTENTS)
        most = self.draw.randint(1, self.draw.choice((5, LONGEST_OUTPUT)))
        whole = self.alone(customer, content, prompt, most)
        generated = whole[: self.draw.randint(0, most - 1)] if kind < 0.15 else []
        self.starts[seq] = StartSequence(
            seq, customer, content, prompt, generated, most, Sampling(seed=1), [], WEIGHTS[customer]
        )
        self.open.add(seq)
        self.tokens[seq] = list(generated)
        self.engine.handle(self.starts[seq])

    def alone(self, customer: str, content: str, prompt: list[int], most: int) -> list[int]:
        chain, tokens = self.runner.chains.of(customer, content, prompt)[-1], list[int]()
        for _ in range(most):
            tokens.append(self.runner.chains.token(chain))
            chain = self.runner.chains.after(chain, tokens[-1])
        return tokens

    def move(self, most_open: int) -> None:
        """What the worker does between two steps."""
        draw = self.draw
        while len(self.open) < most_open and draw.random() < 0.6:
            self.start(draw.random())
        if self.open and draw.random() < 0.05:
            self.engine.handle(CancelSequence(draw.choice(sorted(self.open)), FinishReason.CANCELLED))
        if draw.random() < 0.03:
            self.engine.handle(UnloadSlot(draw.choice(CONTENTS[1:])))
        if draw.random() < 0.02:
            self.engine.handle(LoadSlot(draw.choice(CONTENTS[1:]), "/x"))
        due = [content for at, content in self.answers if at <= self.steps]
        self.answers = [(at, content) for at, content in self.answers if at > self.steps]
        for content in due:
            bad = draw.random() < 0.05
            self.engine.handle(FailAdapter(content, "no") if bad else LoadSlot(content, "/x"))

    def step(self) -> None:
        before = list(self.scheduler._running.values())
        self.engine.step()
        self.steps += 1
        for event in self.events:
            match event:
                case Missing(content):
                    self.answers.append((self.steps + self.draw.randint(0, 6), content))
                case SlotEvicted():
                    self.evictions += 1
                case Step():
                    self._take(event)
        self.events.clear()
        self._check(before[:1])

    def _take(self, step: Step) -> None:
        for token in step.tokens:
            assert token.position == len(self.tokens[token.seq])
            self.tokens[token.seq].append(token.id)
        for ended in step.finished:
            self.open.remove(ended.seq)  # KeyError: it ended twice
            start = self.starts[ended.seq]
            # The engine lays what a row raises to its request: the runner's assertions come out here.
            assert ended.reason is not FinishReason.ERROR or ended.detail == "spoiled", ended.detail
            assert ended.length == len(self.tokens[ended.seq])
            whole = self.alone(start.customer, start.content_id, start.prompt, start.max_tokens)
            assert self.tokens[ended.seq] == whole[: ended.length]
            assert ended.reason is not FinishReason.LENGTH or ended.length == start.max_tokens
            assert 0 <= ended.cached < len(start.prompt) + len(start.generated)
            self.runner.hits += ended.cached

    def _check(self, oldest: Sequence[object]) -> None:
        scheduler, blocks = self.scheduler, self.scheduler._blocks
        running = scheduler._running
        holders: dict[int, list[tuple[int, int]]] = {}  # block -> (sequence, place)
        for seq in running:
            assert len(set(blocks.held(seq))) == len(blocks.held(seq))
            for place, block in enumerate(blocks.held(seq)):
                holders.setdefault(block, []).append((seq, place))
        assert all(blocks.holders(block) == len(holders.get(block, [])) for block in range(KV_BLOCKS))
        assert len(holders) + blocks.free == KV_BLOCKS
        assert 0 <= blocks.cached <= blocks.free
        for shared in (each for each in holders.values() if len(each) > 1):
            assert len({place for _, place in shared}) == 1
            assert len({(running[seq].customer, running[seq].content_id) for seq, _ in shared}) == 1
            assert all(place < running[seq].computed // BLOCK_TOKENS for seq, place in shared)
        for waiting in scheduler._waiting:
            assert blocks.held(waiting.seq) == []
            assert waiting.lease.slot == waiting.computed == 0
            self.runner.preempted += waiting.restarted
            assert not any(waiting is each for each in oldest), "the oldest was preempted"
        assert self.slots.leased == sum(bool(s.content_id) for s in running.values())
        unfinished = [*running.values(), *scheduler._waiting]
        assert {s.seq for s in unfinished} == self.open
        assert scheduler.tokens_in_flight() == sum(s.in_flight for s in unfinished)
        self._check_fairness()

    def _check_fairness(self) -> None:
        wanting, service = self.scheduler._fairness._wanting, self.runner.service
        for pair in combinations(CUSTOMERS, 2):
            difference = service[pair[0]] - service[pair[1]]
            if wanting >= set(pair):
                assert abs(difference - self.since.setdefault(pair, difference)) <= BOUND
            else:
                self.since.pop(pair, None)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_ten_thousand_steps(seed: int) -> None:
    fleet = Fleet(seed)
    while fleet.steps < STEPS:
        crowd = fleet.draw.choice((2, 6, 12, 24))
        for _ in range(fleet.draw.randint(5, 60)):
            fleet.move(crowd)
            fleet.step()
    for _ in range(4000):  # no new ones: everybody comes to an end
        if not fleet.open:
            break
        fleet.move(0)
        fleet.step()
    assert not fleet.open
    assert (fleet.slots.leased, fleet.scheduler.free_blocks) == (0, KV_BLOCKS)
    assert (fleet.scheduler.running, fleet.scheduler.waiting, fleet.scheduler.tokens_in_flight()) == (0, 0, 0)
    # The run has met what it is for.
    assert min(fleet.runner.preempted, fleet.runner.failed, fleet.evictions) > 0
    assert fleet.runner.hits > 20 * BLOCK_TOKENS
