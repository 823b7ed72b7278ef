"""What a worker does with each record: once, in order, for the right incarnation, adapter, base, gateway and time."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.adapters import AdapterRecord
from schemas.reasons import AdapterStatus, FinishReason, RejectReason
from schemas.requests import Cancel, Sampling, Submit
from workers.inbox import HOLD_S, REMEMBER_S, Act, Admit, Inbox, Reject, Replaced, Stop

INCARNATION, CONTEXT, LIMIT = 70, 100, 3

ADAPTER = AdapterRecord(
    adapter_id="acme/x@1", customer="acme", version=1, base_model_hash="base", rank=8, alpha=16.0, target_modules=[],
    size_bytes=1, weights_uri="", checksum="", source_uri="", source_checksum="", content_id="c1",
    status=AdapterStatus.READY, command_partition=0, command_offset=0, updated_unix_ms=0,
)  # fmt: skip


def submit(request_id: str = "r", attempt: int = 0, **changes: Any) -> Submit:
    fields: dict[str, Any] = {
        "customer": "acme",
        "adapter": "acme/x@1",
        "content_id": "c1",
        "base_hash": "base",
        "replica": 4,
        "incarnation": INCARNATION,
        "gateway": 2,
        "gateway_incarnation": 9,
        "prompt": [1] * 10,
        "generated": [],
        "max_tokens": 20,
        "sampling": Sampling(1),
        "stop_ids": [2],
        "remaining_ms": 30_000,
    }
    return Submit(request_id=request_id, attempt=attempt, **fields | changes)


def cancel(request_id: str = "r", attempt: int = 0) -> Cancel:
    return Cancel(request_id, attempt, 2, 9)


class Desk:
    """An Inbox with tables one can write to."""

    def __init__(self) -> None:
        self.adapters = {"acme/x@1": ADAPTER}
        self.ghosts = set[tuple[int, int]]()
        self.inbox = Inbox(
            INCARNATION, "base", CONTEXT, LIMIT, lambda name: self.adapters.get(name), lambda *of: of in self.ghosts
        )

    def read(self, record: Submit | Cancel, now: float = 0.0) -> list[Act]:
        return self.inbox.read(record, now)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def reason(acts: list[Act]) -> RejectReason:
    [act] = acts
    assert isinstance(act, Reject)
    return act.reason


def test_admits_with_the_deadline_counted_from_arrival(desk: Desk) -> None:
    asked = submit()
    assert desk.read(asked, 100.0) == [Admit(asked, ADAPTER, 130.0)]
    assert desk.inbox.open == 1
    base = submit("b", adapter="", content_id="")
    assert desk.read(base, 100.0) == [Admit(base, None, 130.0)]


def test_a_record_read_twice_changes_nothing(desk: Desk) -> None:
    asked = submit()
    desk.read(asked)
    assert desk.read(asked) == []
    desk.inbox.finished("r", 0)
    assert desk.read(asked) == []
    assert desk.inbox.open == 0


def test_a_refused_one_read_twice_is_refused_once(desk: Desk) -> None:
    asked = submit(incarnation=INCARNATION - 1)
    assert reason(desk.read(asked)) is RejectReason.STALE
    assert desk.read(asked) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"incarnation": INCARNATION - 1}, RejectReason.STALE),
        ({"incarnation": INCARNATION - 1, "adapter": "acme/none@1"}, RejectReason.STALE),  # not held either
        ({"remaining_ms": 0}, RejectReason.DEADLINE),
        ({"base_hash": "other"}, RejectReason.BASE_MISMATCH),
        ({"max_tokens": 91}, RejectReason.TOO_LONG),
        ({"generated": [5] * 20}, RejectReason.TOO_LONG),
        ({"content_id": "c2"}, RejectReason.CONTENT_MISMATCH),
        ({"customer": "beta"}, RejectReason.UNKNOWN_ADAPTER),
    ],
)
def test_refusals(desk: Desk, changes: dict[str, Any], expected: RejectReason) -> None:
    assert reason(desk.read(submit(**changes))) is expected
    assert desk.inbox.open == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": AdapterStatus.RETIRED}, RejectReason.RETIRED),
        ({"status": AdapterStatus.QUARANTINED}, RejectReason.QUARANTINED),
        ({"base_model_hash": "other"}, RejectReason.BASE_MISMATCH),
    ],
)
def test_refusals_by_the_adapters_table(desk: Desk, changes: dict[str, Any], expected: RejectReason) -> None:
    desk.adapters["acme/x@1"] = msgspec.structs.replace(ADAPTER, **changes)
    assert reason(desk.read(submit())) is expected
    assert isinstance(desk.read(submit("b", adapter="", content_id=""))[0], Admit)


def test_a_quarantine_says_why(desk: Desk) -> None:
    """Its gateway may not have the row yet, and tells the client the same."""
    desk.adapters["acme/x@1"] = msgspec.structs.replace(ADAPTER, status=AdapterStatus.QUARANTINED, why="it rambles")
    [refused] = desk.read(submit())
    assert isinstance(refused, Reject)
    assert (refused.reason, refused.detail) == (RejectReason.QUARANTINED, "it rambles")


def test_the_context_exactly_full_is_fine(desk: Desk) -> None:
    assert isinstance(desk.read(submit(max_tokens=90))[0], Admit)


def test_a_higher_incarnation_means_replaced(desk: Desk) -> None:
    assert desk.read(submit(incarnation=INCARNATION + 1)) == [Replaced(INCARNATION + 1)]
    assert desk.inbox.open == 0


def test_draining_takes_nothing_new(desk: Desk) -> None:
    desk.read(submit("a"))
    desk.inbox.draining = True
    assert reason(desk.read(submit("b"))) is RejectReason.DRAINING
    assert desk.inbox.open == 1


def test_full(desk: Desk) -> None:
    for n in range(LIMIT):
        desk.read(submit(f"r{n}"))
    assert reason(desk.read(submit("x"))) is RejectReason.OVERLOADED
    desk.inbox.finished("r0", 0)
    assert isinstance(desk.read(submit("y"))[0], Admit)


def test_cancel_stops_what_runs(desk: Desk) -> None:
    desk.read(submit())
    assert desk.read(cancel()) == [Stop("r", 0, FinishReason.CANCELLED)]
    assert desk.read(cancel()) == []
    assert desk.inbox.open == 0


def test_cancel_before_its_submit_is_remembered(desk: Desk) -> None:
    assert desk.read(cancel(attempt=1)) == []
    assert desk.read(submit(attempt=0)) == []
    assert desk.read(cancel(attempt=0)) == []  # read again, and late
    assert desk.read(submit(attempt=1)) == []
    assert isinstance(desk.read(submit(attempt=2))[0], Admit)


def test_cancel_of_an_older_attempt_leaves_the_newer_alone(desk: Desk) -> None:
    desk.read(submit(attempt=2))
    assert desk.read(cancel(attempt=1)) == []
    assert desk.read(cancel(attempt=2)) == [Stop("r", 2, FinishReason.CANCELLED)]


def test_a_newer_attempt_ends_the_older(desk: Desk) -> None:
    desk.read(submit(attempt=0))
    again = submit(attempt=1, generated=[8])
    assert desk.read(again) == [Stop("r", 0, FinishReason.CANCELLED), Admit(again, ADAPTER, 30.0)]
    desk.inbox.finished("r", 0)  # the engine's word for the old one does not end the new one
    assert desk.inbox.open == 1
    assert desk.read(submit(attempt=0)) == []


def test_deadline_passes(desk: Desk) -> None:
    desk.read(submit(remaining_ms=5000), 100.0)
    assert desk.inbox.tick(104.9) == []
    assert desk.inbox.tick(105.0) == [Stop("r", 0, FinishReason.DEADLINE)]
    assert desk.inbox.tick(106.0) == []


def test_a_gateway_that_died(desk: Desk) -> None:
    desk.read(submit("a"))
    desk.read(submit("b", gateway_incarnation=10))
    desk.ghosts.add((2, 9))
    assert desk.inbox.tick(1.0) == [Stop("a", 0, FinishReason.GATEWAY_LOST)]
    assert reason(desk.read(submit("c"))) is RejectReason.GATEWAY_LOST
    assert isinstance(desk.read(submit("d", gateway_incarnation=10))[0], Admit)


def test_an_adapter_that_comes_late_is_waited_for(desk: Desk) -> None:
    del desk.adapters["acme/x@1"]
    asked = submit()
    assert desk.read(asked, 100.0) == []
    assert desk.inbox.open == 1
    assert desk.read(asked, 100.1) == []
    assert desk.inbox.tick(100.2) == []
    desk.adapters["acme/x@1"] = ADAPTER
    assert desk.inbox.tick(100.4) == [Admit(asked, ADAPTER, 130.0)]
    assert desk.inbox.tick(100.5) == []


def test_one_that_does_not_come_is_refused_while_the_gateway_still_waits(desk: Desk) -> None:
    desk.adapters.clear()
    desk.read(submit(), 100.0)
    assert desk.inbox.tick(100.0 + HOLD_S - 0.01) == []
    assert reason(desk.inbox.tick(100.0 + HOLD_S)) is RejectReason.UNKNOWN_ADAPTER
    assert HOLD_S < 1.0


def test_held_ones_can_be_cancelled_replaced_and_orphaned(desk: Desk) -> None:
    desk.adapters.clear()
    desk.read(submit("a"))
    desk.read(submit("b"))
    desk.read(submit("c", gateway_incarnation=8))
    assert desk.read(cancel("a")) == []
    assert desk.read(submit("b", attempt=1)) == []
    desk.ghosts.add((2, 8))
    assert reason(desk.inbox.tick(0.1)) is RejectReason.GATEWAY_LOST
    desk.adapters["acme/x@1"] = ADAPTER
    [act] = desk.inbox.tick(0.2)
    assert isinstance(act, Admit)
    assert (act.submit.request_id, act.submit.attempt) == ("b", 1)
    assert desk.inbox.open == 1


def test_memory_is_bounded_by_time(desk: Desk) -> None:
    for n in range(50):
        desk.read(cancel(f"c{n}"), n)
        desk.read(submit(f"s{n}", incarnation=1), n)
    desk.inbox.tick(30.0 + REMEMBER_S)
    assert desk.read(submit("c49", incarnation=1), 700.0) == []
    assert reason(desk.read(submit("s0", incarnation=1), 700.0)) is RejectReason.STALE  # forgotten, and seen anew
    assert len(desk.inbox._seen) < 25
    assert len(desk.inbox._cancelled) < 25


@given(seed=st.integers(0, 100_000))
def test_any_order_any_repeats(seed: int) -> None:
    """Each attempt starts at most once, at most one of a request runs, and every start has one end."""
    rng, desk, now = random.Random(seed), Desk(), 0.0
    records: list[Submit | Cancel] = []
    running: dict[str, int] = {}
    started = set[tuple[str, int]]()
    for _ in range(80):
        now += rng.random()
        if records and rng.random() < 0.3:
            record = rng.choice(records)
        else:
            name, attempt = f"r{rng.randrange(4)}", rng.randrange(4)
            stale = INCARNATION - (rng.random() < 0.1)
            known = rng.choice(("acme/x@1", "acme/late@1", ""))
            content = "c1" if known else ""
            asked = submit(name, attempt, adapter=known, content_id=content, incarnation=stale, remaining_ms=9000)
            record = asked if rng.random() < 0.7 else cancel(name, attempt)
            records.append(record)
        if rng.random() < 0.05:
            desk.adapters["acme/late@1"] = ADAPTER
        acts = desk.read(record, now) if rng.random() < 0.8 else desk.inbox.tick(now)
        for act in acts:
            match act:
                case Admit(asked, _, deadline_at):
                    key = (asked.request_id, asked.attempt)
                    assert key not in started
                    assert asked.request_id not in running
                    assert asked.incarnation == INCARNATION
                    assert now < deadline_at
                    started.add(key)
                    running[asked.request_id] = asked.attempt
                case Stop(request_id, attempt, _):
                    assert running.pop(request_id) == attempt
                case Reject(asked, _, _):
                    assert running.get(asked.request_id, -1) < asked.attempt
        if running and rng.random() < 0.2:
            name = rng.choice(sorted(running))
            desk.inbox.finished(name, running.pop(name))
        assert len(running) <= desk.inbox.open
