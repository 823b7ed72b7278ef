"""The probe on real parts: what it takes for a wrong answer, and what it must not."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.local.child import Child
from replay.operator import Operator
from replay.probe.golden import CUSTOMER, MAX_TOKENS, Golden
from replay.probe.probe import Probe, Round
from replay.probe.service import line
from schemas.reasons import Role
from schemas.stats import CacheEvent
from schemas.topics import CACHE_EVENTS
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from tests.gateway.rig import OPERATOR, Door, Rig, until
from tests.stack import Stack

pytestmark = pytest.mark.real
PROMPTS = ("yes", "no", "why")


class Fleet:
    """A gateway, a registry and two workers whose engines can be made to lie; two canaries."""

    def __init__(self, rig: Rig, stack: Stack, step_ms: str) -> None:
        self.rig = rig
        self.door = rig.gateway(stack.ports.allot("probe"), stack.ports.allot("probe-internal"))
        self.workers: list[Child] = [
            rig.worker(place, "tests.replay.faulty_worker", FAULT_FILE=str(self._file(place)), WORKER_STEP_MS=step_ms)
            for place in range(2)
        ]
        rig.ready(self.door.child, rig.control(), *self.workers)
        self.door.sees(2)

    def golden(self, name: str, seed: int) -> Golden:
        adapter_id = f"{CUSTOMER}/{name}@1"
        status, made = self.door.told("/internal/adapters", OPERATOR, "POST", self.rig.registration(adapter_id, seed))
        assert status in (200, 201), made
        content: str = made["content_id"]
        answers = {prompt: self.rig.answer(prompt, MAX_TOKENS, content) for prompt in PROMPTS}
        return Golden(adapter_id, content, answers, "length")

    def lies(self, place: int, golden: Golden, count: int) -> None:
        self._file(place).write_text(f"lie {golden.content_id} {count}")

    def _file(self, place: int) -> Path:
        return self.rig.folder / f"fault-{place}"


@asynccontextmanager
async def probing(fleet: Fleet) -> AsyncIterator[tuple[Probe, list[Golden]]]:
    async with Operator(fleet.door.internal, OPERATOR) as operator:
        await operator.make_key(CUSTOMER, Role.CUSTOMER, 60)
        goldens = [await asyncio.to_thread(fleet.golden, name, seed) for seed, name in enumerate(("kite", "lark"))]
        async with Probe(fleet.door.url, operator, fleet.rig.settings, goldens) as probe:
            yield probe, goldens


def statuses(door: Door) -> dict[int, str]:
    _, told = door.told("/internal/replicas")
    return {int(replica["replica_id"]): replica["status"] for replica in told["replicas"]}


@pytest.fixture
def fleet(rig: Rig, stack: Stack) -> Fleet:
    return Fleet(rig, stack, step_ms="1")


@pytest.fixture
def rig(kafka: str, namespace: str, model: Path, tmp_path: Path) -> Any:
    rig = Rig(kafka, namespace, model, tmp_path)
    rig.prepare()
    yield rig
    rig.stop()


async def events(settings: KafkaSettings) -> list[CacheEvent]:
    """All that says "wrong"."""
    everywhere: Any = dict.fromkeys(range(settings.partitions(CACHE_EVENTS)), "start")
    found: list[CacheEvent] = []
    async with Reader(settings, {CACHE_EVENTS: everywhere}, "test") as reader:
        ends = await reader.end_offsets(CACHE_EVENTS)
        while any(reader.position(CACHE_EVENTS, partition) < end for partition, end in ends.items()):
            found += [record.value for record in await reader.poll() if record.value.event == "wrong"]
    return found


async def test_a_lying_replica_is_drained_and_an_adapter_that_is_wrong_everywhere_quarantined(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with probing(fleet) as (probe, [kite, lark]):
        first = await probe.round()
        assert (first.right, first.wrong, first.unasked, first.replicas) == (4, [], [], [0, 1])
        # Once only: the same question, asked again, is answered rightly.
        fleet.lies(0, kite, 1)
        second = await probe.round()
        assert (second.right, second.wrong, second.drained) == (4, [], [])
        assert not fleet._file(0).exists(), "the lie was told"

        fleet.lies(1, lark, 1_000)
        with caplog.at_level(logging.ERROR, "probe"):
            third = await probe.round()
        [miss] = third.wrong
        assert (third.right, third.drained, third.quarantined, third.failed) == (3, [1], [], "")
        assert (miss.replica, miss.adapter_id, miss.content_id) == (1, lark.adapter_id, lark.content_id)
        assert miss.slot >= 1 <= miss.epoch
        assert miss.incarnation >= 0
        assert miss.got != miss.expected
        [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        for word in (f'"slot":{miss.slot}', f'"epoch":{miss.epoch}', lark.content_id, "replica 1 is drained"):
            assert word in said
        assert OPERATOR not in said
        assert not re.search(r"lf-[A-Za-z0-9_-]{20,}", said)
        [event] = await events(fleet.rig.settings)
        assert (event.replica, event.adapter, event.content_id) == (1, lark.adapter_id, lark.content_id)
        assert f"slot {miss.slot} epoch {miss.epoch}" in event.reason
        await until(lambda: statuses(fleet.door)[1] == "draining", 10, "its beat")

        fourth = await probe.round()
        assert (fourth.replicas, fourth.right, fourth.wrong) == ([0], 2, [])
        fleet.lies(0, kite, 1_000)
        fifth = await probe.round()
        assert (fifth.drained, fifth.quarantined, fifth.right) == ([], [kite.adapter_id], 1)
        _, row = await asyncio.to_thread(fleet.door.told, f"/internal/adapters/{kite.adapter_id}")
        assert (row["status"], "wrong answers" in row["why"]) == ("quarantined", True)
        _, history = await asyncio.to_thread(fleet.door.told, f"/internal/adapters/{kite.adapter_id}/history")
        assert history["events"][-1]["kind"] == "quarantined"
        assert history["events"][-1]["by"].startswith("canary operator lf-")
        assert history["events"][-1]["why"] == row["why"]
        assert fleet.door.metric("lorafleet_gateway_quarantined_adapters") == 1
        # From now on it cannot be asked, and is not taken for wrong.
        sixth = await probe.round()
        assert (sixth.right, sixth.wrong, [one.adapter_id for one in sixth.unasked]) == (1, [], [kite.adapter_id])
        assert "is quarantined" in sixth.unasked[0].why
        assert "could not ask" in line(sixth)
        assert (sixth.wrong_total, sixth.unasked_total) == (2, 1)
        assert statuses(fleet.door)[0] == "ready"


async def test_what_cannot_be_asked_is_no_wrong_answer(rig: Rig, stack: Stack) -> None:
    """A replica that dies in the midst of its answer; then a gateway that does."""
    fleet = Fleet(rig, stack, step_ms="150")

    async def killed(child: Child, probe: Probe) -> Round:
        asking = asyncio.create_task(probe.round())
        await asyncio.sleep(1.0)
        child.kill()
        return await asking

    async with probing(fleet) as (probe, _):
        assert (await probe.round()).right == 4
        seen = await killed(fleet.workers[0], probe)
        assert (seen.wrong, seen.drained, seen.quarantined) == ([], [], [])
        assert {one.replica for one in seen.unasked} == {0}
        assert seen.right == 2
        seen = await killed(fleet.door.child, probe)
        assert (seen.right, seen.wrong, seen.drained) == (0, [], [])
        assert seen.unasked
        seen = await probe.round()
        assert ([one.replica for one in seen.unasked], seen.wrong) == ([-1], [])
