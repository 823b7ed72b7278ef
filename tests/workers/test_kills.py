"""What dies, and what the others see of it: engine, worker, place, broker."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from infra.local.kafka import Kafka
from schemas.reasons import FinishReason, RejectReason
from schemas.replicas import ENGINE_CRASHED, ReplicaStatus
from schemas.tokens import Rejected
from tests.stack import Stack, started
from tests.workers.rig import Rig, answer

pytestmark = pytest.mark.real
ENDLESS = 15_000


async def test_an_engine_that_is_killed_takes_the_worker_with_it_by_name(rig: Rig) -> None:
    child = rig.worker(WORKER_STEP_MS="20")
    incarnation = await rig.ready(child)
    await rig.submit("r", [1], ENDLESS, incarnation)
    await rig.until(lambda: len(rig.of("r").ids) > 3)
    os.kill(rig.engine(child), signal.SIGKILL)
    await rig.until(lambda: rig.gone(incarnation) is not None, 5)
    gone = rig.gone(incarnation)
    assert gone is not None
    assert gone.reason == ENGINE_CRASHED
    assert await rig.exit_status(child) == 3
    await rig.until(lambda: [row.reason for row in rig.rows] == [FinishReason.ERROR])
    assert rig.of("r").end is None  # the gateway re-drives it


async def test_an_engine_that_hangs_stops_the_beats_and_is_killed(rig: Rig) -> None:
    child = rig.worker(WORKER_STEP_MS="20")
    incarnation = await rig.ready(child)
    os.kill(rig.engine(child), signal.SIGSTOP)
    await rig.until(lambda: rig.gone(incarnation) is not None, 20)
    ready = [at for at, beat in rig.beats if beat.status is ReplicaStatus.READY]
    [gone_at] = [at for at, beat in rig.beats if beat.status is ReplicaStatus.GONE]
    assert gone_at - ready[-1] > 2, "the beats went on while the engine hung"
    assert await rig.exit_status(child) == 3


async def test_a_newer_claim_ends_the_older_worker_at_once(rig: Rig) -> None:
    old = rig.worker(name="-old", WORKER_STEP_MS="5")
    first = await rig.ready(old)
    await rig.submit("r", [1], ENDLESS, first)
    await rig.until(lambda: len(rig.of("r").ids) > 3)
    new = rig.worker(name="-new", WORKER_STEP_MS="5", WORKER_TAKE_OVER="1")
    second = await rig.ready(new)
    assert second > first
    assert await rig.exit_status(old) == 4
    told = len(rig.of("r").events)
    word = rig.gone(first)
    assert word is not None
    assert word.reason == "died"  # the newcomer's word, who was told so: the old one said none
    await rig.submit("stale", [1], 9, first)
    end = await rig.ended("stale")
    assert isinstance(end, Rejected)
    assert end.reason is RejectReason.STALE
    await rig.submit("r2", [1], 9, second)
    assert (await rig.finished("r2", FinishReason.LENGTH)).ids == answer([1], 9)
    assert len(rig.of("r").events) == told
    # A record for an incarnation that is later still: somebody has claimed, and the table will say so.
    await rig.submit("future", [1], 9, second + 1)
    assert await rig.exit_status(new) == 4


async def test_of_two_workers_for_one_place_exactly_one_survives(rig: Rig) -> None:
    workers = [rig.worker(name=name, WORKER_TAKE_OVER="1") for name in ("-a", "-b")]
    await rig.until(lambda: any(child.returncode() is not None for child in workers), 40)
    [survivor] = [child for child in workers if child.returncode() is None]
    [loser] = [child for child in workers if child is not survivor]
    assert loser.returncode() == 4
    await rig.ready(survivor)
    await rig.submit("r", [1], 9, rig.claims[-1][0])
    assert (await rig.finished("r", FinishReason.LENGTH)).ids == answer([1], 9)


async def test_a_broker_that_is_killed_and_comes_back_costs_no_token(
    stack: Stack, namespace: str, tmp_path: Path
) -> None:
    ports = stack.ports
    service = Kafka(
        tmp_path / "kafka", ports.allot("kafka-worker"), ports.allot("kafka-worker-controller"), tmp_path / "kafka.log"
    )
    broker = started(service)
    rig = Rig(service.bootstrap, namespace, tmp_path)
    await rig.start()
    try:
        child = rig.worker(WORKER_STEP_MS="20")
        incarnation = await rig.ready(child)
        for n in range(3):
            await rig.submit(f"r{n}", [n], 900, incarnation)
        await rig.until(lambda: all(len(rig.of(f"r{n}").ids) > 5 for n in range(3)))
        broker.kill()
        await asyncio.sleep(3)
        broker.stop()
        broker = started(service)
        for n in range(3):
            heard = await rig.finished(f"r{n}", FinishReason.LENGTH, limit_s=60)
            assert heard.ids == answer([n], 900)
        assert child.returncode() is None
        assert len(rig.claims) == 1
        await rig.submit("after", [9], 9, incarnation)
        assert (await rig.finished("after", FinishReason.LENGTH)).ids == answer([9], 9)
    finally:
        await rig.stop()
        broker.stop()
