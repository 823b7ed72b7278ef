"""The scheduler under an engine that computes nothing: order, budgets, bounded waiting, and an end for everyone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.engine import CancelSequence, FailAdapter, LoadSlot, Missing, SlotEvicted, SlotFailed, SlotLoaded
from schemas.engine import UnloadSlot as Unload
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from tests.workers.engine.tiny import KV_TOKENS, InProcess, NeverMerged, content_id, start
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.runner import Model, Opened, Stamps
from workers.engine.scheduler import Failure, Outcome, Row
from workers.engine.slots import Lease
from workers.engine.waiting import BLOCKED_PASSES
from workers.slot_image import ImageError


class Counting(NeverMerged):
    """Gives 100 + output position as the next token, and keeps every step's rows for inspection."""

    def __init__(self) -> None:
        self.model = Model("h", "counting", 256, 1000)
        self.rows: list[list[tuple[int, int, int, bool]]] = []
        self.stamps = Stamps()
        self.bad: set[str] = set()

    def open(self, content_id: str, path: Path) -> Opened:
        if content_id in self.bad:
            raise ImageError("bad")

        def copy(filling: Lease) -> int:
            self.stamps.write(filling)
            return 1

        return Opened(0, copy)

    def clear(self, slot: int) -> None:
        self.stamps.erase(slot)

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        self.rows.append([(row.sequence.seq, row.start, row.count, row.samples) for row in rows])
        for row in rows:
            assert self.stamps.mismatch(row) == ""
            assert len(row.blocks) * BLOCK_TOKENS >= row.start + row.count
            assert row.start == row.sequence.computed
        return [100 + row.sequence.length if row.samples else None for row in rows]


def load(name: str) -> LoadSlot:
    return LoadSlot(content_id(name), f"/{name}")


def test_prompts_are_read_in_chunks_beside_decode_rows() -> None:
    engine = InProcess(counting := Counting(), 1, prompt_tokens=50)
    engine.say(
        start(1, [1] * 5, max_tokens=4), start(2, [2] * 120, max_tokens=2), start(3, [3] * 30, max_tokens=1)
    ).run()
    assert counting.rows == [
        [(1, 0, 5, True), (2, 0, 45, False)],
        [(1, 5, 1, True), (2, 45, 50, False)],
        [(1, 6, 1, True), (2, 95, 25, True), (3, 0, 25, False)],
        [(1, 7, 1, True), (2, 120, 1, True), (3, 25, 5, True)],
    ]
    assert [engine.tokens(seq) for seq in (1, 2, 3)] == [[100, 101, 102, 103], [100, 101], [100]]
    assert [step.tokens_in_flight for step in engine.steps()] == [111, 60, 8, 0]


def test_a_sequence_goes_on_where_an_earlier_attempt_stopped() -> None:
    engine = InProcess(Counting(), 1).say(start(1, [1, 2, 3], max_tokens=6, generated=[100, 101])).run()
    assert engine.tokens(1) == [102, 103, 104, 105]
    assert engine.steps()[0].tokens[0].position == 2
    assert (engine.finished(1).length, engine.finished(1).reason) == (6, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("generated", "stop", "max_tokens", "reason", "length"),
    [
        ([], [102], 9, FinishReason.STOP, 3),
        ([], [], 3, FinishReason.LENGTH, 3),
        ([], [], 500, FinishReason.LENGTH, 253),  # the context's end
        ([100, 101], [101], 9, FinishReason.STOP, 2),  # only the word of its end was lost
        ([100, 101], [], 2, FinishReason.LENGTH, 2),
        ([], [], 0, FinishReason.LENGTH, 0),
    ],
)
def test_ends(generated: list[int], stop: list[int], max_tokens: int, reason: FinishReason, length: int) -> None:
    engine = InProcess(Counting(), 1)
    engine.say(start(1, [1, 2, 3], max_tokens=max_tokens, generated=generated, stop_ids=stop)).run()
    ended = engine.finished(1)
    assert (ended.reason, ended.length) == (reason, length)
    assert sum(len(step.tokens) for step in engine.steps()) == length - len(generated)


@pytest.mark.parametrize(
    ("prompt", "sampling", "kv_tokens", "said"),
    [
        ([], Sampling(1), 512, "prompt: it is empty"),
        ([1000], Sampling(1), 512, "outside 0..999"),
        ([-1], Sampling(1), 512, "outside"),
        ([1] * 256, Sampling(1), 512, "context of 256"),
        ([1] * 40, Sampling(1), 48, "max_tokens: 52 tokens in all"),
        ([1], Sampling(1, temperature=-1), 512, "temperature"),
        ([1], Sampling(1, temperature=float("nan")), 512, "temperature"),
        ([1], Sampling(1, top_p=0), 512, "top_p"),
    ],
)
def test_what_can_never_run_ends_at_once(prompt: list[int], sampling: Sampling, kv_tokens: int, said: str) -> None:
    engine = InProcess(Counting(), 1, kv_tokens).say(start(1, prompt, sampling=sampling)).run()
    assert engine.finished(1).reason is FinishReason.ERROR
    assert said in engine.finished(1).detail


def test_a_missing_adapter_is_said_once_and_others_pass() -> None:
    engine = InProcess(counting := Counting(), 2)
    engine.say(start(1, [1], "a", max_tokens=2), start(2, [1], "a", max_tokens=2), start(3, [1], max_tokens=2)).run()
    assert [event for event in engine.events if isinstance(event, Missing)] == [Missing(content_id("a"))]
    assert {seq for rows in counting.rows for seq, *_ in rows} == {3}
    engine.say(load("a")).run()
    assert SlotLoaded(content_id("a"), 1, 1, 1, 0.0) in engine.events
    assert (engine.tokens(1), engine.tokens(2)) == ([100, 101], [100, 101])
    assert (engine.finished(1).slot, engine.finished(1).epoch) == (1, 1)
    assert [step.joined for step in engine.steps() if step.joined] == [[3], [1, 2]]


def test_a_failed_adapter_ends_those_who_wait_and_may_be_asked_for_again() -> None:
    engine = InProcess(counting := Counting(), 2).say(start(1, [1], "a"), start(2, [1])).run()
    engine.say(FailAdapter(content_id("a"), "the store is away")).run()
    assert engine.finished(1).reason is FinishReason.LOAD_FAILED
    assert engine.finished(1).detail == "the store is away"
    counting.bad.add(content_id("a"))
    engine.say(start(3, [1], "a")).run()
    engine.say(load("a")).run()
    again = [event for event in engine.events if isinstance(event, Missing | SlotFailed)]
    assert [type(event) for event in again] == [Missing, Missing, SlotFailed, Missing]


def test_a_load_waits_while_every_slot_is_leased_and_evicts_only_idle_ones() -> None:
    engine = InProcess(Counting(), 1).say(load("a"), start(1, [1], "a", max_tokens=5), start(2, [1], "b", max_tokens=1))
    engine.engine.step()
    engine.say(load("b"), Unload(content_id("a")))
    assert engine.events[-1] == SlotFailed(content_id("a"), "in use")
    engine.run()
    kinds = [event for event in engine.events if isinstance(event, SlotLoaded | SlotEvicted)]
    assert kinds == [
        SlotLoaded(content_id("a"), 1, 1, 1, 0.0),
        SlotEvicted(content_id("a"), 1),
        SlotLoaded(content_id("b"), 1, 2, 1, 0.0),
    ]
    assert engine.finished(2).epoch == 2
    engine.say(Unload(content_id("b")), Unload(content_id("b")))
    assert engine.events[-2:] == [SlotEvicted(content_id("b"), 1), SlotEvicted(content_id("b"), 0)]


def test_a_bad_image_evicts_nobody() -> None:
    engine = InProcess(counting := Counting(), 1).say(load("a"))
    counting.bad.add(content_id("b"))
    engine.say(load("b")).run()
    assert engine.events[-1] == SlotFailed(content_id("b"), "bad")
    assert list(engine.slots.contents()) == [content_id("a")]


def test_a_stream_for_a_resident_adapter_cannot_starve_another() -> None:
    engine = InProcess(Counting(), 1).say(load("a"), start(1, [1], "a", max_tokens=3), start(2, [1], "b", max_tokens=1))
    engine.say(load("b"))
    for seq in range(3, 1000):
        engine.say(start(seq, [1], "a", max_tokens=3))
        engine.engine.step()
        if any(ended.seq == 2 for step in engine.steps() for ended in step.finished):
            break
    assert 2 < seq < BLOCKED_PASSES + 40
    assert engine.finished(2).reason is FinishReason.LENGTH


def test_two_adapters_that_wait_for_a_row_do_not_evict_each_other() -> None:
    engine = InProcess(Counting(), 1)
    engine.say(*(start(seq, [1], max_tokens=50) for seq in range(1, 33)))  # every row is taken
    engine.say(load("a"), start(40, [1], "a", max_tokens=1), start(41, [1], "b", max_tokens=1))
    for _ in range(10):
        engine.engine.step()
        engine.say(load("b"))
    assert sum(isinstance(event, SlotLoaded) for event in engine.events) == 1
    engine.run()
    assert (engine.tokens(40), engine.tokens(41)) == ([100], [100])


def test_when_blocks_run_out_the_youngest_starts_over() -> None:
    engine = InProcess(counting := Counting(), 1, kv_tokens=6 * BLOCK_TOKENS)
    engine.say(*(start(seq, [1] * 20, max_tokens=60) for seq in (1, 2, 3))).run()
    assert all(engine.tokens(seq) == list(range(100, 160)) for seq in (1, 2, 3))
    joined = [seq for step in engine.steps() for seq in step.joined]
    assert joined.count(1) == 1
    assert len(joined) > 3
    # What was computed before is taken over, so few tokens are computed twice.
    assert sum(count for rows in counting.rows for _, _, count, _ in rows) < 3 * 80 + (len(joined) - 3) * BLOCK_TOKENS
    assert engine.scheduler.free_blocks == 6


ADAPTERS = ["", "a", "b", "c"]
STARTS = st.tuples(st.integers(1, 60), st.sampled_from(ADAPTERS), st.integers(0, 20))


@settings(max_examples=120, deadline=None)
@given(
    moves=st.lists(
        STARTS
        | st.tuples(st.just("cancel"), st.integers(0, 30))
        | st.tuples(st.just("fail"), st.sampled_from("abc"))
        | st.tuples(st.just("unload"), st.sampled_from("abc"))
        | st.tuples(st.just("steps"), st.integers(1, 4)),
        max_size=40,
    ),
    slots=st.integers(1, 2),
    kv_blocks=st.integers(5, 12),
)
def test_everyone_ends_once_with_the_right_tokens(moves: list[tuple[object, ...]], slots: int, kv_blocks: int) -> None:
    """A worker that answers each Missing a few steps later, random starts, cancels, failures and unloads."""
    counting = Counting()
    engine = InProcess(counting, slots, kv_tokens=kv_blocks * BLOCK_TOKENS, prompt_tokens=16)
    wanted: dict[int, int] = {}
    answered = 0

    def step() -> bool:
        nonlocal answered
        news, answered = engine.events[answered:], len(engine.events)
        for event in news:
            if isinstance(event, Missing):
                engine.say(LoadSlot(event.content_id, "/x"))
        computed = engine.engine.step()
        return computed or len(engine.events) > answered

    for seq, move in enumerate(moves):
        match move:
            case ("cancel", int(who)):
                engine.say(CancelSequence(who, FinishReason.CANCELLED))
            case ("fail", str(who)):
                engine.say(FailAdapter(content_id(who), "no"))
            case ("unload", str(who)):
                engine.say(Unload(content_id(who)))
            case ("steps", int(count)):
                for _ in range(count):
                    step()
            case (int(length), str(adapter), int(most)):
                wanted[seq] = most
                engine.say(start(seq, [1] * length, adapter, max_tokens=most))
    for _ in range(4000):
        if not step():
            break
    else:
        pytest.fail("the engine never came to rest")

    for seq, most in wanted.items():
        ended = engine.finished(seq)
        tokens = [(token.position, token.id) for s in engine.steps() for token in s.tokens if token.seq == seq]
        assert tokens == [(position, 100 + position) for position in range(ended.length)]
        assert ended.reason in (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LOAD_FAILED)
        assert ended.reason is not FinishReason.LENGTH or ended.length == most
    for rows in counting.rows:
        assert len(rows) <= 32
        assert sum(count for _, _, count, samples in rows if count > 1 or not samples) <= 16
    assert engine.slots.leased == 0
    assert engine.scheduler.free_blocks == kv_blocks
    assert engine.scheduler.tokens_in_flight() == 0


def test_a_failing_row_ends_alone() -> None:
    counting = Counting()
    engine = InProcess(counting, 1)
    whole = counting.run

    def failing(rows: Sequence[Row]) -> list[Outcome]:
        return [
            Failure("broken") if row.sequence.seq == 1 and row.sequence.length == 2 else outcome
            for row, outcome in zip(rows, whole(rows), strict=True)
        ]

    counting.run = failing  # type: ignore[method-assign]
    engine.say(start(1, [1]), start(2, [1])).run()
    assert (engine.finished(1).reason, engine.finished(1).detail) == (FinishReason.ERROR, "broken")
    assert engine.finished(1).length == 2
    assert engine.finished(2).reason is FinishReason.LENGTH


def raising(counting: Counting, bad: set[int]) -> None:
    """From here on a step raises if it holds one of these sequences."""
    whole = counting.run

    def run(rows: Sequence[Row]) -> list[Outcome]:
        if bad & {row.sequence.seq for row in rows}:
            raise RuntimeError("boom")
        return whole(rows)

    counting.run = run  # type: ignore[method-assign]


def test_a_row_that_raises_ends_alone_and_its_neighbours_lose_no_token() -> None:
    raising(counting := Counting(), {2})
    engine = InProcess(counting, 1).say(*(start(seq, [seq] * 40) for seq in (1, 2, 3))).run()
    assert engine.finished(2).reason is FinishReason.ERROR
    assert engine.finished(2).detail == "this row cannot be computed: RuntimeError: boom"
    assert engine.tokens(1) == engine.tokens(3) == list(range(100, 112))
    assert engine.scheduler.free_blocks == KV_TOKENS // BLOCK_TOKENS


def test_where_no_row_can_be_computed_the_engine_stops() -> None:
    raising(counting := Counting(), {1, 2})
    with pytest.raises(RuntimeError, match="boom"):
        InProcess(counting, 1).say(start(1, [1]), start(2, [2])).run()


def test_single_rows_that_raise_stop_the_engine_at_the_third_on_end() -> None:
    raising(counting := Counting(), {1, 2, 4, 5, 6})
    engine = InProcess(counting, 1)
    for seq in (1, 2, 3, 4, 5):
        engine.say(start(seq, [1])).run()
    assert engine.finished(3).reason is FinishReason.LENGTH
    with pytest.raises(RuntimeError, match="boom"):
        engine.say(start(6, [1])).run()
