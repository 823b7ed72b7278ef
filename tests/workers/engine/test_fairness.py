import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.engine import StartSequence
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from workers.engine.fairness import INPUT_COST, OUTPUT_COST, Fairness, cost
from workers.engine.scheduler import Limits, Row, Scheduler
from workers.engine.slots import Slots

KV_TOKENS = 640


def start(seq: int, customer: str, prompt: int, output: int, weight: float = 1.0) -> StartSequence:
    """Every prompt has its own first token, so that none is found in the prefix cache."""
    ids = [seq % 9000, *range(1, prompt)]
    return StartSequence(seq, customer, "", ids, [], output, Sampling(seed=1), [], weight)


class Busy:
    """A scheduler without an engine, and what each customer got: prompt tokens first read, and output tokens."""

    def __init__(self, rows: int = 4, prompt_tokens: int = 32) -> None:
        limits = Limits(9000, 4096, KV_TOKENS, rows, prompt_tokens)
        self.scheduler = Scheduler(limits, Slots(1))
        self.read: dict[str, int] = {}
        self.wrote: dict[str, int] = {}
        self.order: list[int] = []
        self._seen: dict[int, int] = {}

    def step(self) -> list[Row]:
        rows = self.scheduler.plan()
        self.order += self.scheduler.joined()
        for row in rows:
            sequence = row.sequence
            end, seen = min(row.start + row.count, sequence.given), self._seen.get(sequence.seq, 0)
            self.read[sequence.customer] = self.read.get(sequence.customer, 0) + max(0, end - max(seen, row.start))
            self._seen[sequence.seq] = max(seen, end)
            self.wrote[sequence.customer] = self.wrote.get(sequence.customer, 0) + row.samples
        self.scheduler.settle(rows, [7 if row.samples else None for row in rows])
        return rows

    def served(self, customer: str) -> float:
        return INPUT_COST * self.read.get(customer, 0) + OUTPUT_COST * self.wrote.get(customer, 0)


def test_costs_are_the_paper_s_over_the_weight() -> None:
    assert (cost(1, 10), cost(1, 0, 10), cost(4, 10, 5)) == (10, 20, 5)


def test_who_comes_back_is_lifted_to_the_least_of_those_who_wanted() -> None:
    fairness = Fairness()
    fairness.want({"a", "b"})
    fairness.charge("a", 1, 100, 0)
    fairness.charge("b", 1, 0, 30)
    fairness.want({"a", "b", "c"})
    assert [fairness.counter(c) for c in "abc"] == [100, 60, 60]
    fairness.charge("c", 1, 500, 0)
    fairness.want({"a", "b"})
    fairness.charge("b", 2, 100, 0)
    fairness.want({"a", "b", "c"})  # c was away, and does not get rid of what it had
    assert [fairness.counter(c) for c in "abc"] == [100, 110, 560]


def test_only_who_is_above_the_floor_is_remembered_and_nobody_after_a_pause() -> None:
    fairness = Fairness()
    for visitor in range(100):
        fairness.want({"a", f"v{visitor}"})
        fairness.charge("a", 1, 10, 0)
    assert len(fairness) <= 3
    fairness.charge("a", 1, 1000, 0)
    fairness.want(set())
    fairness.want({"a", "b"})
    assert [fairness.counter(c) for c in "ab"] == [0, 0]


BACKLOG = st.tuples(st.integers(1, 150), st.integers(1, 60))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.tuples(BACKLOG, BACKLOG),
    weights=st.tuples(st.sampled_from((0.5, 1.0, 3.0)), st.sampled_from((1.0, 2.0))),
    rows=st.integers(1, 6),
)
def test_between_two_backlogged_customers_service_differs_by_a_bound(
    shapes: tuple[tuple[int, int], tuple[int, int]], weights: tuple[float, float], rows: int
) -> None:
    """The paper's bound, twice the larger of one prompt and the outputs that fit the memory, at the smallest weight."""
    busy = Busy(rows)
    seqs = iter(range(1, 100_000))

    def feed() -> None:
        for customer, (prompt, output), weight in zip("ab", shapes, weights, strict=True):
            while sum(s.customer == customer for s in busy.scheduler._waiting) <= rows:
                busy.scheduler.start(start(next(seqs), customer, prompt, output, weight))

    bound = 2 * max(INPUT_COST * 150, OUTPUT_COST * KV_TOKENS) / min(weights)
    for _ in range(400):
        feed()
        busy.step()
        assert abs(busy.served("a") / weights[0] - busy.served("b") / weights[1]) <= bound
    assert busy.served("a") + busy.served("b") > 2 * 400 * min(rows, 2)


def test_a_flood_of_one_customer_does_not_stand_before_another() -> None:
    busy = Busy(rows=2)
    for seq in range(1, 50):
        busy.scheduler.start(start(seq, "flood", 30, 10))
    busy.step()
    busy.scheduler.start(start(100, "late", 30, 10))
    while 100 not in busy.order:
        busy.step()
    assert len(busy.order) <= 4


def test_places_of_an_empty_batch_are_shared() -> None:
    """Counters are equal and nothing is read yet: what is admitted counts as read."""
    busy = Busy(rows=4)
    for seq in range(1, 9):
        busy.scheduler.start(start(seq, "a", 40, 5))
    for seq in range(11, 19):
        busy.scheduler.start(start(seq, "b", 40, 5))
    busy.step()
    assert busy.order == [1, 11, 2, 12]


def test_the_prompt_tokens_of_a_step_are_shared_by_weight() -> None:
    busy = Busy(rows=2, prompt_tokens=16)
    busy.scheduler.start(start(1, "a", 300, 1, weight=2.0))
    busy.scheduler.start(start(2, "b", 300, 1))
    for _ in range(18):
        busy.step()
    assert (busy.read["a"], busy.read["b"]) == (192, 96)


def test_within_a_customer_first_come_first_served() -> None:
    busy = Busy(rows=1)
    for seq in (5, 3, 9, 4):
        busy.scheduler.start(start(seq, "a", 70 if seq == 5 else 3, 2))
    for _ in range(40):
        busy.step()
    assert busy.order == [5, 3, 9, 4]


def test_what_comes_from_the_prefix_cache_is_free_and_output_is_not() -> None:
    class Noted(Fairness):
        def charge(self, customer: str, weight: float, inputs: int, outputs: int) -> None:
            charged.append(cost(weight, inputs, outputs))

    busy, charged = Busy(), list[float]()
    busy.scheduler._fairness = Noted()
    for expected in (65 * INPUT_COST + 3 * OUTPUT_COST, 1 * INPUT_COST + 3 * OUTPUT_COST):
        busy.scheduler.start(StartSequence(int(expected), "a", "", list(range(65)), [], 3, Sampling(seed=1), []))
        charged.clear()
        while busy.step():
            pass
        assert sum(charged) == expected


@pytest.mark.parametrize(
    ("customers", "most", "gives_way"), [("aaa", "a", 3), ("aba", "b", 2), ("aba", "a", 3), ("abb", "a", 3)]
)
def test_the_youngest_of_the_most_served_gives_way_never_the_oldest(customers: str, most: str, gives_way: int) -> None:
    busy = Busy(rows=3, prompt_tokens=640)
    for seq, customer in enumerate(customers, 1):
        busy.scheduler.start(start(seq, customer, 180, 100))
    charged: list[int] = []

    class Noted(Fairness):
        def charge(self, customer: str, weight: float, inputs: int, outputs: int) -> None:
            charged.append(inputs)
            super().charge(customer, weight, inputs, outputs)

    busy.scheduler._fairness = Noted()
    busy.step()
    busy.scheduler._fairness.charge(most, 1, 5000, 0)
    for _ in range(400):
        busy.step()
    assert busy.order[3] == gives_way
    assert 1 not in busy.order[3:]
    # What was read twice was served, and paid, once.
    assert sum(charged) == 5000 + 3 * 180
    assert sum(busy.read.values()) == 3 * 180
    assert sum(busy.wrote.values()) == 3 * 100


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    ended = Busy().scheduler.start(start(1, "a", 3, 3, weight))
    assert ended is not None
    assert (ended.reason, ended.detail.split(":")[0]) == (FinishReason.ERROR, "weight")
