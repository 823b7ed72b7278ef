"""Adapters in the worker process: from the real store through every tier into the simulated engine's slots."""

import asyncio
import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.local.store import ADAPTERS as BUCKET
from infra.local.store import Store
from schemas.adapters import AdapterRecord
from schemas.placement import AdapterStats, Load, Unload
from schemas.reasons import AdapterStatus, FinishReason, RejectReason, Tier
from schemas.replicas import Answer, Answered, Residency
from schemas.requests import Submit
from schemas.tokens import Admitted, Rejected
from schemas.topics import ADAPTER_STATS, ADAPTERS, REPLICA_COMMANDS
from streams.adapters.canonical import write_canonical
from streams.adapters.delta import Pair
from streams.adapters.shape import ModelShape
from tests.workers.rig import Heard, Rig, answer

pytestmark = pytest.mark.real
ENDLESS = 15_000


class Shop:
    """A worker with real adapters in a real store."""

    def __init__(self, rig: Rig, store: Store) -> None:
        self.rig, self.store = rig, store
        self.env = {
            "LORAFLEET_STORE": f"s3://{BUCKET}",
            "S3_ENDPOINT_URL": store.endpoint,
            "AWS_ACCESS_KEY_ID": store.access_key,
            "AWS_SECRET_ACCESS_KEY": store.secret_key,
            "LORAFLEET_MAX_RANK": "4",
        }
        self.incarnation = -1

    def made(self, version: int) -> AdapterRecord:
        """An adapter of acme's, its canonical file in the store, its record not yet in the table."""
        values, shape = np.random.default_rng(version), ModelShape.of(self.rig.model)
        delta = {
            (layer, matrix): Pair(
                values.normal(size=(4, k)).astype(np.float32), values.normal(size=(d, 4)).astype(np.float32), 2.0
            )
            for layer in range(shape.layers)
            for matrix, (k, d) in shape.matrices().items()
        }
        path = Path(self.rig.folder / f"{version}.safetensors")
        content_id = write_canonical(path, delta, self.rig.base_hash)
        name = f"{self.rig.settings.namespace}{path.name}"
        self.store.client().fput_object(BUCKET, name, str(path))
        return AdapterRecord(
            adapter_id=f"acme/support@{version}",
            customer="acme",
            version=version,
            base_model_hash=self.rig.base_hash,
            rank=4,
            alpha=8.0,
            target_modules=["q_proj"],
            size_bytes=path.stat().st_size,
            weights_uri=f"s3://{BUCKET}/{name}",
            checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
            source_uri="",
            source_checksum="",
            content_id=content_id,
            status=AdapterStatus.READY,
            command_partition=0,
            command_offset=version,
            updated_unix_ms=0,
        )

    async def say(self, record: AdapterRecord) -> None:
        await self.rig.writer.send(ADAPTERS, record, key=record.adapter_id)

    async def ask(self, request: str, record: AdapterRecord, count: int = 20, **more: object) -> Submit:
        of = {"adapter": record.adapter_id, "content_id": record.content_id, **more}
        return await self.rig.submit(request, [1, 2, 3], count, self.incarnation, **of)

    async def answered(self, request: str, record: AdapterRecord, tier: Tier) -> Heard:
        """The right adapter's answer, found in `tier`."""
        heard = await self.rig.finished(request, FinishReason.LENGTH)
        assert heard.events[0] == Admitted(request, 0, tier)
        assert heard.ids == answer([1, 2, 3], len(heard.ids), record.content_id)
        return heard

    async def refused(self, request: str, reason: RejectReason) -> None:
        end = await self.rig.ended(request)
        assert isinstance(end, Rejected)
        assert end.reason is reason

    async def resident(self, holds: Residency) -> None:
        await self.rig.until(
            lambda: (
                bool(self.rig.beats)
                and (now := self.rig.beats[-1][1].residency).gpu_adapters == holds.gpu_adapters
                and now.ram_adapters == holds.ram_adapters
                and now.disk_adapters == holds.disk_adapters
            ),
            what=f"{holds} in a beat",
        )


@pytest.fixture
def shop(rig: Rig, store: Store) -> Shop:
    return Shop(rig, store)


async def test_an_adapter_goes_through_every_tier(shop: Shop) -> None:
    rig = shop.rig
    one, two = shop.made(1), shop.made(2)
    assert one.content_id != two.content_id
    await shop.say(one)
    await shop.say(two)
    shop.incarnation = await rig.ready(rig.worker(shop.env, WORKER_SLOTS="1", WORKER_STEP_MS="2"))

    for n in range(3):  # one load, however many wait
        await shop.ask(f"cold{n}", one)
    await rig.submit("base", [1, 2, 3], 20, shop.incarnation)
    await shop.answered("cold0", one, Tier.REMOTE)
    for n in (1, 2):  # they may come too late to wait
        heard = await rig.finished(f"cold{n}", FinishReason.LENGTH)
        assert heard.ids == answer([1, 2, 3], 20, one.content_id)
    assert (await rig.finished("base", FinishReason.LENGTH)).ids == answer([1, 2, 3], 20)
    await shop.ask("warm", one)
    await shop.answered("warm", one, Tier.GPU)
    await shop.ask("other", two)
    await shop.answered("other", two, Tier.REMOTE)
    await shop.ask("again", one)
    await shop.answered("again", one, Tier.RAM)
    await shop.resident(Residency([one.adapter_id], [one.adapter_id, two.adapter_id], [two.adapter_id, one.adapter_id]))

    slots = [(e.event, e.adapter, e.source) for e in rig.cache if e.tier is Tier.GPU]
    assert slots == [
        ("load", one.adapter_id, Tier.REMOTE),
        ("evict", one.adapter_id, Tier.NONE),
        ("load", two.adapter_id, Tier.REMOTE),
        ("evict", two.adapter_id, Tier.NONE),
        ("load", one.adapter_id, Tier.RAM),
    ]
    rows = {row.request_id: row for row in rig.rows}
    assert rows["warm"].slot == rows["again"].slot == 1
    assert rows["warm"].epoch < rows["other"].epoch < rows["again"].epoch
    assert rows["warm"].load_ms == 0 < rows["cold0"].load_ms


async def test_what_the_table_says_of_an_adapter_decides(shop: Shop) -> None:
    rig, right = shop.rig, shop.made(1)
    lost = msgspec.structs.replace(
        shop.made(2), weights_uri=f"s3://{BUCKET}/nowhere.safetensors", adapter_id="acme/support@2"
    )
    retired = msgspec.structs.replace(shop.made(3), status=AdapterStatus.RETIRED)
    for record in (lost, retired):
        await shop.say(record)
    shop.incarnation = await rig.ready(rig.worker(shop.env, WORKER_STEP_MS="2"))

    # The gateway heard of it a little earlier than this worker does.
    await shop.ask("early", right)
    await asyncio.sleep(0.2)
    assert not rig.of("early").events
    await shop.say(right)
    await shop.answered("early", right, Tier.REMOTE)

    await shop.ask("lost", lost)
    end = (await rig.finished("lost", FinishReason.LOAD_FAILED)).end
    assert "nowhere.safetensors" in getattr(end, "detail", "")
    await shop.ask("lost again", lost)
    await rig.finished("lost again", FinishReason.LOAD_FAILED)
    await shop.ask("retired", retired)
    await shop.refused("retired", RejectReason.RETIRED)
    await shop.ask("forged", right, content_id=retired.content_id)
    await shop.refused("forged", RejectReason.CONTENT_MISMATCH)
    await shop.ask("stolen", right, customer="rival")
    await shop.refused("stolen", RejectReason.UNKNOWN_ADAPTER)
    # A late write of a registry that was replaced since: older than what the table has.
    await shop.say(msgspec.structs.replace(right, status=AdapterStatus.RETIRED, command_offset=0))
    await asyncio.sleep(0.5)
    await shop.ask("still", right)
    await shop.answered("still", right, Tier.GPU)


async def test_adapters_are_loaded_and_unloaded_on_command_and_never_while_in_use(shop: Shop) -> None:
    rig, one = shop.rig, shop.made(1)
    await shop.say(one)
    shop.incarnation = await rig.ready(rig.worker(shop.env, WORKER_STEP_MS="10"))
    await rig.writer.send(REPLICA_COMMANDS, Load("c1", one.adapter_id), key="c1", partition=0)
    await shop.resident(Residency([one.adapter_id], [one.adapter_id], [one.adapter_id]))
    await shop.ask("runs", one, ENDLESS)
    await rig.until(lambda: len(rig.of("runs").ids) > 3)
    assert rig.of("runs").events[0] == Admitted("runs", 0, Tier.GPU)
    await rig.writer.send(REPLICA_COMMANDS, Unload("c2", one.adapter_id), key="c2", partition=0)
    before = len(rig.of("runs").ids)
    await rig.until(lambda: len(rig.of("runs").ids) > before + 50)
    await rig.until(lambda: rig.beats[-1][1].tiers.slot_leases == 1)
    await rig.cancel("runs")
    ids = (await rig.finished("runs", FinishReason.CANCELLED)).ids
    assert ids == answer([1, 2, 3], len(ids), one.content_id)
    await shop.resident(Residency([one.adapter_id], [one.adapter_id], [one.adapter_id]))
    await rig.writer.send(REPLICA_COMMANDS, Unload("c3", one.adapter_id), key="c3", partition=0)
    await shop.resident(Residency([], [one.adapter_id], [one.adapter_id]))
    await rig.until(lambda: rig.beats[-1][1].tiers.slot_leases == 0)
    tiers = rig.beats[-1][1].tiers
    assert (tiers.gpu_bytes, tiers.file_leases, tiers.loads, tiers.incidents) == (0, 0, 0, 0)
    assert (tiers.disk_bytes, tiers.disk_limit_bytes) == (one.size_bytes, 10 << 30)
    assert 0 < tiers.ram_bytes < tiers.ram_limit_bytes


async def test_commands_are_answered_in_the_beats(shop: Shop) -> None:
    rig, one = shop.rig, shop.made(1)
    lost = msgspec.structs.replace(
        shop.made(2), weights_uri=f"s3://{BUCKET}/nowhere.safetensors", adapter_id="acme/support@2"
    )
    gone = msgspec.structs.replace(shop.made(3), status=AdapterStatus.RETIRED)
    for record in (one, lost, gone):
        await shop.say(record)
    shop.incarnation = await rig.ready(rig.worker(shop.env, WORKER_STEP_MS="10"))

    async def told(command: Load | Unload) -> Answer:
        await rig.writer.send(REPLICA_COMMANDS, command, key=command.command_id, partition=0)
        return await answered(command.command_id)

    async def answered(command_id: str) -> Answer:
        def found() -> list[Answer]:
            return [a for a in rig.beats[-1][1].answers if a.command_id == command_id]

        await rig.until(lambda: bool(found()), what=f"the answer to {command_id}")
        [answer] = found()
        return answer

    assert (await told(Unload("early", one.adapter_id))).outcome is Answered.NOT_THERE
    assert await told(Load("load", one.adapter_id)) == Answer("load", Answered.DONE)
    assert rig.beats[-1][1].residency.gpu_adapters == [one.adapter_id]
    assert await told(Load("again", one.adapter_id)) == Answer("again", Answered.DONE)
    failed = await told(Load("lost", lost.adapter_id))
    assert (failed.outcome, failed.lasting, "nowhere.safetensors" in failed.reason) == (Answered.FAILED, True, True)
    [noted] = rig.beats[-1][1].failed_loads
    assert (noted.adapter_id, noted.reason, noted.lasting) == (lost.adapter_id, failed.reason, True)
    assert "is retired" in (await told(Load("gone", gone.adapter_id))).reason
    assert "not known here" in (await told(Load("never", "acme/never@1"))).reason

    await shop.ask("runs", one, ENDLESS)
    await rig.until(lambda: len(rig.of("runs").ids) > 3)
    busy = await told(Unload("busy", one.adapter_id))
    assert (busy.outcome, "1 requests run with it" in busy.reason) == (Answered.IN_USE, True)
    assert (await told(Unload("short", one.adapter_id, 0.2))).outcome is Answered.IN_USE
    await shop.ask("between", one, 5)  # a drain that was given up shuts nobody out
    await rig.finished("between", FinishReason.LENGTH)
    await rig.writer.send(REPLICA_COMMANDS, Unload("drain", one.adapter_id, 60.0), key="d", partition=0)
    await asyncio.sleep(0.5)
    await shop.ask("late", one)
    await shop.refused("late", RejectReason.DRAINING)
    await rig.submit("base", [1, 2, 3], 5, shop.incarnation)
    await rig.finished("base", FinishReason.LENGTH)
    assert not [a for a in rig.beats[-1][1].answers if a.command_id == "drain"]
    await rig.cancel("runs")
    await rig.finished("runs", FinishReason.CANCELLED)
    assert (await answered("drain")).outcome is Answered.DONE
    assert rig.beats[-1][1].residency.gpu_adapters == []
    await shop.ask("after", one)
    await shop.answered("after", one, Tier.RAM)

    await shop.say(msgspec.structs.replace(lost, weights_uri=shop.made(2).weights_uri, command_offset=99))
    await rig.until(lambda: bool(rig.beats[-1][1].failed_loads))
    assert (await told(Load("mended", lost.adapter_id))).outcome is Answered.DONE
    assert rig.beats[-1][1].failed_loads == []


async def test_what_the_fleet_owns_here_comes_without_a_request(shop: Shop) -> None:
    """A lone replica owns all: the most used first, and a new one as soon as it is known."""
    rig, one, two, three = shop.rig, shop.made(1), shop.made(2), shop.made(3)
    await shop.say(one)
    await shop.say(two)
    await rig.writer.send(ADAPTER_STATS, AdapterStats(two.adapter_id, 0, 5, 1.0, 1.0), key=two.adapter_id)
    shop.incarnation = await rig.ready(rig.worker(shop.env, WORKER_STEP_MS="2"))
    pulled = [one.adapter_id, two.adapter_id]
    await rig.until(
        lambda: bool(rig.beats) and sorted(rig.beats[-1][1].residency.ram_adapters) == pulled, 30, "what it owns in RAM"
    )
    assert [e.adapter for e in rig.cache if e.tier is Tier.RAM] == [two.adapter_id, one.adapter_id]
    await rig.until(lambda: rig.beats[-1][1].tiers.missing == 0)
    assert rig.beats[-1][1].residency.gpu_adapters == []
    await shop.ask("first", one)
    await shop.answered("first", one, Tier.RAM)
    await shop.say(three)
    await rig.until(lambda: three.adapter_id in rig.beats[-1][1].residency.ram_adapters, what="the new one in RAM")
