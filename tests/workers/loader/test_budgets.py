"""Each tier keeps to its bytes: the least recently used idle one goes, and nothing else."""

import asyncio
import os

import pytest

from schemas.reasons import Tier
from tests.workers.loader.rig import IMAGE, Rig, once, until
from workers.loader.loader import LoadFailed


async def test_the_least_recently_used_makes_room_in_both_tiers(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(4)]
    loader = await rig.loader(disk=3 * records[0].size_bytes, ram=2 * IMAGE)
    for record in (*records[:3], records[1], records[3]):
        await once(loader, record)
    assert [loader.tier(record) for record in records] == [Tier.REMOTE, Tier.RAM, Tier.DISK, Tier.RAM]
    assert len(rig.on_disk()) == 3
    assert len(rig.in_memory()) == 2
    evicted = [(event.content_id, event.tier) for event in rig.events if event.event == "evict"]
    assert evicted == [
        (records[0].content_id, Tier.RAM),
        (records[0].content_id, Tier.DISK),
        (records[2].content_id, Tier.RAM),
    ]


async def test_an_image_in_use_is_not_evicted(rig: Rig) -> None:
    loader, one, two = await rig.loader(ram=IMAGE), rig.adapter(0), rig.adapter(1)
    async with loader.image(one) as path:
        waiting = asyncio.create_task(once(loader, two))
        await until(lambda: loader.tier(two) is Tier.DISK)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert path.exists()
    await waiting
    assert not path.exists()
    assert loader.tier(one) is Tier.DISK


async def test_no_room_at_all_is_said(rig: Rig) -> None:
    loader, record = await rig.loader(ram=IMAGE - 1), rig.adapter(0)
    with pytest.raises(LoadFailed, match="the whole tier"):
        await once(loader, record)
    assert loader.tier(record) is Tier.DISK


async def test_a_smaller_budget_after_a_restart_keeps_the_newest(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(3)]
    loader = await rig.loader()
    for n, record in enumerate(records):
        await once(loader, record)
        os.utime(rig.data / "adapters" / f"{record.content_id}.safetensors", (1_000 + n, 1_000 + n))
    second = await rig.loader(disk=2 * records[0].size_bytes)
    assert [second.tier(record) for record in records] == [Tier.REMOTE, Tier.DISK, Tier.DISK]
    assert len(rig.on_disk()) == 2
    third = await rig.loader(disk=0)
    assert third.disk.names() == []
    assert rig.on_disk() == []
