"""From the store over the disk into shared memory: what is there, and in which form."""

import msgspec
import numpy as np
import pytest

from infra.local.store import Store as EmbeddedStore
from schemas.reasons import Tier
from streams.adapters.locations import parse_location
from streams.adapters.store import S3Settings, open_store
from tests.streams.adapters.files import TINY
from tests.workers.loader.rig import IMAGE, RANK, Rig, once
from workers.loader.loader import LoadFailed
from workers.slot_image import Precision, image_bytes, open_image


async def test_from_the_store_over_the_disk_into_memory(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    assert loader.tier(record) is Tier.REMOTE
    async with loader.image(record) as path:
        assert loader.tier(record) is Tier.RAM
        image = open_image(path, record.content_id, TINY, RANK)
        assert image.scale().all()
        assert loader.ram.leases()[record.content_id]
    assert not loader.ram.leases()
    assert not loader.disk.leases()
    assert rig.on_disk() == [f"{record.content_id}.safetensors"]
    assert rig.in_memory() == [record.content_id]
    await once(loader, record)
    assert rig.store.fetches == 1
    assert rig.told() == [("load", Tier.DISK, Tier.REMOTE), ("load", Tier.RAM, Tier.REMOTE)]
    assert [(event.bytes, event.replica, event.incarnation) for event in rig.events] == [
        (record.size_bytes, 3, 7),
        (IMAGE, 3, 7),
    ]


async def test_an_image_is_for_the_smallest_slots_that_hold_the_adapter(rig: Rig) -> None:
    loader, record = await rig.loader(slot_ranks=(2, 4, RANK)), rig.adapter(0)
    async with loader.image(record) as path:
        assert open_image(path, record.content_id, TINY, 2, 4, RANK).rank == 4
        assert path.stat().st_size == image_bytes(TINY, 4, Precision.F32) == rig.events[-1].bytes


async def test_an_adapter_of_16_bits_takes_half_the_memory(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0, np.float16)
    async with loader.image(record) as path:
        assert open_image(path, record.content_id, TINY, RANK).precision is Precision.F16
        size = image_bytes(TINY, RANK, Precision.F16)
        assert path.stat().st_size == size == rig.events[-1].bytes == loader.ram.used_bytes < IMAGE * 0.6


async def test_shared_memory_cleared_by_others_is_filled_again(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    (await once(loader, record)).unlink()
    await once(loader, record)
    assert rig.store.fetches == 1


@pytest.mark.real
async def test_from_the_real_store(rig: Rig, store: EmbeddedStore) -> None:
    settings = S3Settings(store.endpoint, store.access_key, store.secret_key)
    s3 = open_store(parse_location(f"s3://adapters/{rig.folder.name}"), settings)
    record = rig.adapter(0)
    there = s3.root.under("0.safetensors")
    s3.put(rig.remote / "0.safetensors", there, record.checksum)
    record = msgspec.structs.replace(record, weights_uri=str(there))
    loader = await rig.loader(store=s3)
    await once(loader, record)
    missing = msgspec.structs.replace(record, content_id="0" * 64, weights_uri=str(s3.root.under("nothing")))
    with pytest.raises(LoadFailed, match="no such object"):
        await once(loader, missing)
