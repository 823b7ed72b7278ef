"""One load however many wait; who gives up, fails or stops leaves no lease."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from schemas.adapters import AdapterRecord
from schemas.reasons import Tier
from tests.workers.loader.rig import IMAGE, Rig, nothing_left, once, until
from workers.loader.loader import LoadFailed


async def test_one_load_however_many_wait(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    twin = msgspec.structs.replace(record, adapter_id="globex/x@1", customer="globex")
    rig.store.open.clear()
    waiting = [asyncio.create_task(once(loader, one)) for one in [record, twin] * 20]
    await until(lambda: rig.store.fetches == 1)
    waiting[0].cancel()  # one that gives up does not end it for the others
    waiting[5].cancel()
    rig.store.open.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 2
    assert sum(isinstance(result, Path) for result in results) == 38
    assert rig.store.fetches == 1
    assert not loader.ram.leases()
    assert loader.ram.used_bytes == IMAGE


async def test_a_load_that_nobody_waits_for_any_more_leaves_no_pin(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.open.clear()
    waiting = asyncio.create_task(once(loader, record))
    await until(lambda: rig.store.fetches == 1)
    waiting.cancel()
    await asyncio.wait({waiting})
    rig.store.open.set()
    await until(lambda: loader.tier(record) is Tier.RAM)
    assert not loader.ram.leases()
    assert not loader.disk.leases()


async def test_all_who_wait_hear_the_same_reason_and_the_next_one_tries_anew(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    (rig.remote / "0.safetensors").rename(rig.remote / "away")
    rig.store.open.clear()
    waiting = [asyncio.create_task(once(loader, record)) for _ in range(10)]
    await until(lambda: rig.store.fetches == 1)
    rig.store.open.set()
    reasons = {str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)}
    assert len(reasons) == 1
    assert "no such file" in reasons.pop()
    nothing_left(rig, loader)
    (rig.remote / "away").rename(rig.remote / "0.safetensors")
    await once(loader, record)


async def test_stopping_in_the_middle_ends_all_who_wait(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.open.clear()
    waiting = asyncio.create_task(once(loader, record))
    await until(lambda: rig.store.fetches == 1)
    stopping = asyncio.create_task(loader.stop())
    await asyncio.sleep(0.02)
    rig.store.open.set()
    await stopping
    with pytest.raises(LoadFailed, match="stopping"):
        await waiting


async def test_any_mix_of_loads_gives_ups_and_failures_leaks_nothing(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(6)]
    loader, chance = await rig.loader(disk=4 * records[0].size_bytes, ram=2 * IMAGE), random.Random(5)
    broken = msgspec.structs.replace(records[5], checksum="0" * 64)

    async def use(record: AdapterRecord) -> None:
        async with loader.image(record) as path:
            before = path.stat().st_ino
            await asyncio.sleep(chance.random() * 0.01)
            assert path.stat().st_ino == before, "evicted while in use"

    async def visit() -> None:
        for _ in range(15):
            task = asyncio.create_task(use(chance.choice([*records[:5], broken])))
            _, pending = await asyncio.wait({task}, timeout=chance.choice([0.0, 0.005, 0.02, 20, 20]))
            for late in pending:
                late.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert error is None or isinstance(error, LoadFailed | asyncio.CancelledError), error

    await asyncio.gather(*(visit() for _ in range(8)))
    await until(lambda: not loader.on_their_way)
    assert not loader.ram.leases()
    assert not loader.disk.leases()
    assert loader.ram.used_bytes == IMAGE * len(loader.ram.names()) == IMAGE * len(rig.in_memory())
    assert loader.disk.used_bytes == sum(path.stat().st_size for path in (rig.data / "adapters").iterdir())
