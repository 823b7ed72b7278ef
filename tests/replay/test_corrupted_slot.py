"""A slot of one replica goes bad while customers are being served, and the probe takes out what is at fault.

The real model on two replicas, real canaries, the real road. Run with -s to see how long it took and how many requests
the slot could have touched.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from replay.operator import Operator
from replay.probe.golden import goldens
from replay.probe.probe import Probe, Round
from replay.streams import Script, Take, take
from tests.gateway.rig import ACME, OPERATOR, Door, Rig, until
from tests.replay.test_probe import statuses
from tests.stack import Stack

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
EVERY_S = 2.0
MODELS = ("acme/one@1", "acme/two@1", "SmolLM2-135M-Instruct")


class Company:
    """Two replicas whose engines have a fault when their file says so."""

    def __init__(self, rig: Rig, stack: Stack) -> None:
        self.rig = rig
        self.door = rig.gateway(stack.ports.allot("slots"), stack.ports.allot("slots-internal"))
        env = {"WORKER_ENGINE": "torch", "WORKER_THREADS": "1", "WORKER_KV_TOKENS": "4096", "WORKER_SLOTS": "4"}
        workers = [
            rig.worker(place, "tests.replay.faulty_worker", FAULT_FILE=str(self.fault(place)), **env)
            for place in range(2)
        ]
        rig.ready(self.door.child, rig.control(), *workers)
        self.door.sees(2)
        for seed, model in enumerate(MODELS[:2]):
            status, told = self.door.told("/internal/adapters", OPERATOR, "POST", rig.registration(model, seed))
            assert status == 201, told

    def fault(self, place: int) -> Path:
        return self.rig.folder / f"fault-{place}"

    @property
    def environment(self) -> dict[str, str]:
        """As the probe is given it by a stack's state."""
        folder = self.rig.folder
        return {
            "LORAFLEET_MODEL": str(self.rig.model_folder),
            "LORAFLEET_STORE": f"file://{folder}/store",
            "LORAFLEET_SOURCES": f"file://{folder}/inbox",
        }

    def ended(self) -> list[tuple[str, int, str]]:
        """Customer, replica and adapter of each request that has ended, in that order."""
        lines = self.door.child.output().splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"type":"request"')]
        return [(row["customer"], row["replica"], row["adapter"]) for row in rows]


@pytest.fixture
def company(kafka: str, namespace: str, model: Path, stack: Stack, tmp_path: Path) -> Iterator[Company]:
    rig = Rig(kafka, namespace, model, tmp_path)
    rig.prepare()
    try:
        yield Company(rig, stack)
    finally:
        rig.stop()


@asynccontextmanager
async def traffic(door: Door) -> AsyncIterator[list[Take]]:
    """One customer's chats, each model's one after the other, for as long as the body runs."""
    takes: list[Take] = []

    async def talk(model: str) -> None:
        number = 0
        async with aiohttp.ClientSession() as session:
            while not over.is_set():
                number += 1
                takes.append(await take(session, door.url, Script(ACME, model, f"question {number}", 12)))

    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for model in MODELS:
            tasks.create_task(talk(model))
        try:
            yield takes
        finally:
            over.set()


async def rounds(probe: Probe, most: int) -> Round:
    """Rounds, EVERY_S apart, until one sees something wrong."""
    for _ in range(most):
        seen = await probe.round()
        if seen.wrong:
            return seen
        await asyncio.sleep(EVERY_S)
    raise AssertionError(f"{most} rounds saw nothing wrong")


@dataclass
class Fault:
    """When it began, and how many requests had ended by then."""

    company: Company
    place: int
    began: float = 0.0
    ended: int = 0

    async def begin(self, what: str) -> None:
        """Returns when the slot is bad."""
        file = self.company.fault(self.place)
        file.write_text(what)
        await until(lambda: not file.exists(), 20, "the fault")
        self.began, self.ended = time.monotonic(), len(self.company.ended())

    def tell(self, what: str, seen: Round) -> None:
        """What it came to, on the screen."""
        [miss] = seen.wrong
        after = self.company.ended()[self.ended :]
        there = [(whose, adapter) for whose, replica, adapter in after if replica == self.place]
        slot = [whose for whose, adapter in there if adapter == miss.adapter_id]
        print(
            f"\n{what} {time.monotonic() - self.began:.1f} s after the fault, rounds every {EVERY_S:g} s: meanwhile "
            f"{len(after)} requests ended, {len(there)} on replica {self.place}, {len(slot)} in slot {miss.slot}, all "
            f"of them {set(slot)}'s; {miss.expected} became {miss.got}"
        )


async def test_the_probe_finds_a_bad_slot_while_customers_are_served(company: Company) -> None:
    door, folder = company.door, company.rig.folder
    async with Operator(door.internal, OPERATOR) as operator:
        tenant = await operator.make_customer("canary")
        known = await goldens(operator, company.environment, folder / "canaries", print)
        assert await goldens(operator, company.environment, folder / "elsewhere", print) == known
        assert not (folder / "elsewhere").exists(), "what is registered is not trained again"
        kite, lark = known
        async with Probe(door.url, operator, company.rig.settings, known) as probe, traffic(door) as takes:
            first = await probe.round()
            assert (first.right, first.wrong, first.unasked) == (4, [], []), first
            await until(lambda: {0, 1} <= {replica for who, replica, _ in company.ended() if who == "acme"}, 60, "both")

            # One replica answers with another adapter's weights: it goes, and the customers notice nothing.
            fault = Fault(company, 1)
            await fault.begin(f"swap {kite.content_id} {lark.content_id}")
            seen = await rounds(probe, 20)
            await until(lambda: statuses(door)[1] == "draining", 10, "its beat")
            fault.tell("drained", seen)
            [miss] = seen.wrong
            assert (miss.replica, miss.adapter_id, seen.drained, seen.quarantined) == (1, kite.adapter_id, [1], [])
            assert miss.slot >= 1 <= miss.epoch
            assert lark.answers["yes"] in miss.got
            last = await probe.round()
            assert (last.replicas, last.right, last.wrong) == ([0], 2, [])

            # The only replica that is left has other bytes in a slot: the adapter goes, the replica serves on.
            fault = Fault(company, 0)
            await fault.begin(f"garble {lark.content_id}")
            seen = await rounds(probe, 20)
            fault.tell("quarantined", seen)
            [miss] = seen.wrong
            assert (miss.replica, miss.adapter_id, seen.drained, seen.quarantined) == (
                0,
                lark.adapter_id,
                [],
                [miss.adapter_id],
            )
            async with aiohttp.ClientSession() as session:
                refused = await take(session, door.url, Script(tenant.key, lark.adapter_id, "yes", 4))
            assert f'503 {{"error":{{"message":"{lark.adapter_id} is quarantined: it gives wrong' in refused.error
            assert statuses(door) == {0: "ready", 1: "draining"}
        assert all(one.whole for one in takes), [one.error for one in takes if not one.whole]
