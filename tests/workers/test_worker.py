"""The worker process, with the simulated engine, through the real broker: what gateways see of it."""

import pytest

from schemas.placement import Drain
from schemas.reasons import FinishReason, RejectReason, Tier
from schemas.replicas import ReplicaStatus
from schemas.tokens import Admitted, Finished, Rejected
from schemas.topics import REPLICA_COMMANDS
from tests.workers.rig import Rig, answer

pytestmark = pytest.mark.real
ENDLESS = 15_000  # tokens: longer than any test waits


async def test_a_submit_is_admitted_and_streams_the_right_tokens(rig: Rig) -> None:
    incarnation = await rig.ready(rig.worker())
    await rig.submit("r1", [1, 2, 3], 50, incarnation)
    heard = await rig.finished("r1", FinishReason.LENGTH)
    assert heard.events[0] == Admitted("r1", 0, Tier.NONE)
    assert heard.ids == answer([1, 2, 3], 50)
    await rig.until(lambda: len(rig.rows) == 1)
    row = rig.rows[0]
    assert (row.request_id, row.output_tokens, row.reason) == ("r1", 50, FinishReason.LENGTH)
    assert 0 < row.first_token_ms <= row.total_ms

    # A later attempt goes on where the tokens so far end, and a stop token ends it.
    right = answer([1, 2, 3], 30)
    more = {"attempt": 2, "generated": right[:10], "stop_ids": [right[20]]}
    await rig.submit("r1", [1, 2, 3], 30, incarnation, **more)
    heard = await rig.finished("r1", FinishReason.STOP, attempt=2)
    assert (heard.first_position, heard.ids) == (10, right[10:21])

    # Many at once: each its own answer, one batch a step for all of them.
    before = len(rig.batches)
    for n in range(8):
        await rig.submit(f"many{n}", [n, 5], 20, incarnation)
    for n in range(8):
        assert (await rig.finished(f"many{n}", FinishReason.LENGTH)).ids == answer([n, 5], 20)
    assert len(rig.batches) > before
    assert all(batch.incarnation == incarnation for batch in rig.batches)


async def test_what_is_read_twice_is_done_once_and_what_cannot_run_is_refused(rig: Rig) -> None:
    incarnation = await rig.ready(rig.worker(WORKER_STEP_MS="5", WORKER_MAX_OPEN="3"))
    await rig.submit("twice", [1], 40, incarnation)
    await rig.submit("twice", [1], 40, incarnation)
    assert (await rig.finished("twice", FinishReason.LENGTH)).ids == answer([1], 40)
    await rig.submit("twice", [1], 40, incarnation)

    async def refused(request: str, reason: RejectReason) -> None:
        end = await rig.ended(request)
        assert isinstance(end, Rejected)
        assert end.reason is reason

    await rig.submit("stale", [1], 9, incarnation - 1)
    await refused("stale", RejectReason.STALE)
    await rig.submit("foreign", [1], 9, incarnation, base_hash="c" * 64)
    await refused("foreign", RejectReason.BASE_MISMATCH)
    await rig.submit("long", [1], 20_000, incarnation)
    await refused("long", RejectReason.TOO_LONG)
    await rig.submit("unknown", [1], 9, incarnation, adapter="acme/x@1", content_id="d" * 64)
    await refused("unknown", RejectReason.UNKNOWN_ADAPTER)
    for n in range(4):
        await rig.submit(f"full{n}", [1], ENDLESS, incarnation)
    await refused("full3", RejectReason.OVERLOADED)
    for n in range(3):
        await rig.cancel(f"full{n}")
        await rig.finished(f"full{n}", FinishReason.CANCELLED)
    await rig.submit("late", [1], ENDLESS, incarnation, remaining_ms=400)
    assert len((await rig.finished("late", FinishReason.DEADLINE)).ids) > 0
    assert len([e for b in rig.batches for e in b.events if e == Admitted("twice", 0, Tier.NONE)]) == 1


async def test_a_cancel_frees_the_row_in_each_phase(rig: Rig) -> None:
    incarnation = await rig.ready(rig.worker(WORKER_STEP_MS="10"))
    await rig.cancel("early")
    await rig.submit("early", [1], 9, incarnation)
    for n in range(40):  # more than the engine has rows
        await rig.submit(f"r{n}", [n], ENDLESS, incarnation)
    await rig.until(lambda: len(rig.of("r0").ids) > 5)
    assert not rig.of("r39").ids
    await rig.cancel("r39")
    assert (await rig.finished("r39", FinishReason.CANCELLED)).ids == []
    await rig.cancel("r0")
    heard = await rig.finished("r0", FinishReason.CANCELLED)
    assert heard.ids == answer([0], len(heard.ids))
    await rig.until(lambda: len(rig.of("r32").ids) > 0, what="the next in the queue has the freed row")
    for n in range(1, 39):
        await rig.cancel(f"r{n}")
    for n in range(1, 39):
        await rig.finished(f"r{n}", FinishReason.CANCELLED)
    await rig.cancel("r0")
    last = rig.beats[-1][1].beat
    await rig.until(lambda: rig.beats[-1][1].beat > last + 1)
    load = rig.beats[-1][1].load
    assert (load.running, load.waiting, load.tokens_in_flight) == (0, 0, 0)
    assert ("early", 0) not in rig.heard
    assert not rig.of("r0", 1).events


async def test_told_to_end_it_finishes_what_runs_and_takes_nothing_new(rig: Rig) -> None:
    child = rig.worker(WORKER_STEP_MS="20")
    incarnation = await rig.ready(child)
    await rig.submit("runs", [1], 100, incarnation)
    await rig.until(lambda: len(rig.of("runs").ids) > 3)
    child.terminate()
    await rig.until(lambda: rig.beats[-1][1].status is ReplicaStatus.DRAINING)
    await rig.submit("new", [1], 100, incarnation)
    end = await rig.ended("new")
    assert isinstance(end, Rejected)
    assert end.reason is RejectReason.DRAINING
    assert (await rig.finished("runs", FinishReason.LENGTH)).ids == answer([1], 100)
    assert await rig.exit_status(child) == 0
    await rig.until(lambda: rig.gone(incarnation) is not None)


async def test_told_to_end_it_leaves_at_once_when_nothing_runs(rig: Rig) -> None:
    child = rig.worker(WORKER_DRAIN_S="60")
    incarnation = await rig.ready(child)
    child.terminate()
    assert await rig.exit_status(child) == 0
    await rig.until(lambda: rig.gone(incarnation) is not None)


async def test_told_to_drain_it_stays_and_told_to_end_it_leaves_in_time(rig: Rig) -> None:
    child = rig.worker(WORKER_STEP_MS="20", WORKER_DRAIN_S="1")
    incarnation = await rig.ready(child)
    await rig.submit("runs", [1], ENDLESS, incarnation)
    await rig.until(lambda: len(rig.of("runs").ids) > 3)
    await rig.writer.send(REPLICA_COMMANDS, Drain("c1"), key="c1", partition=0)
    await rig.until(lambda: rig.beats[-1][1].status is ReplicaStatus.DRAINING)
    await rig.submit("new", [1], 100, incarnation)
    assert isinstance(await rig.ended("new"), Rejected)
    child.terminate()
    assert await rig.exit_status(child) == 0
    await rig.until(lambda: rig.gone(incarnation) is not None)
    await rig.until(lambda: [row.reason for row in rig.rows] == [FinishReason.CANCELLED])
    assert not isinstance(rig.of("runs").end, Finished)


async def test_a_gateway_that_falls_silent_loses_its_sequences(rig: Rig) -> None:
    incarnation = await rig.ready(rig.worker(WORKER_STEP_MS="20"))
    await rig.submit("orphan", [1], ENDLESS, incarnation)
    await rig.until(lambda: len(rig.of("orphan").ids) > 3)
    rig.fall_silent()
    await rig.finished("orphan", FinishReason.GATEWAY_LOST, limit_s=25)
    await rig.submit("ghost", [1], 9, incarnation)
    end = await rig.ended("ghost")
    assert isinstance(end, Rejected)
    assert end.reason is RejectReason.GATEWAY_LOST
