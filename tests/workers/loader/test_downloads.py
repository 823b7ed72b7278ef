"""Downloads: bounded, gone on with where they broke off, tried again only where that can help."""

import asyncio
import hashlib

import msgspec
import pytest

from infra.local.store import Store as EmbeddedStore
from schemas.adapters import AdapterRecord
from schemas.reasons import Tier
from streams.adapters import s3_store
from streams.adapters.locations import parse_location
from streams.adapters.store import S3Settings, StoreError, Unavailable, open_store
from tests.workers.loader.between import Between
from tests.workers.loader.rig import Rig, nothing_left, once, until
from workers.loader import backoff
from workers.loader.backoff import Backoff
from workers.loader.loader import LoadFailed


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes in half a second."""
    for name in ("FIRST_S", "LONGEST_S", "AWAY_LIMIT_S"):
        monkeypatch.setattr(backoff, name, getattr(backoff, name) / 120)


def on_disk(rig: Rig, record: AdapterRecord) -> str:
    """The sum of what is there."""
    return hashlib.sha256((rig.data / "adapters" / f"{record.content_id}.safetensors").read_bytes()).hexdigest()


async def test_downloads_are_bounded(rig: Rig) -> None:
    loader = await rig.loader()
    records = [rig.adapter(seed) for seed in range(8)]
    await asyncio.gather(*(once(loader, record) for record in records))
    assert rig.store.fetches == 8
    assert rig.store.most_together <= 2


async def test_a_store_that_is_away_for_a_moment_is_tried_again(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.failures = [Unavailable("away"), Unavailable("still")]
    await once(loader, record)
    assert rig.store.fetches == 3
    assert [event.event for event in rig.events] == ["load", "load"]


async def test_what_broke_off_goes_on_at_its_last_byte(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.breaks = [1000, 1, 5000]
    await once(loader, record)
    assert rig.store.starts == [0, 1000, 1001, 6001]
    assert on_disk(rig, record) == record.checksum


async def test_a_store_that_knows_no_ranges_sends_all_of_it_again(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.ranges = False
    rig.store.breaks = [1000, 300]
    await once(loader, record)
    assert rig.store.starts == [0, 0, 0]
    assert on_disk(rig, record) == record.checksum


async def test_a_file_put_together_of_two_is_fetched_once_more_in_one_go(rig: Rig) -> None:
    """The object was another one when the first half came."""
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.says, rig.store.breaks = [b"\1" * record.size_bytes], [1000]
    await once(loader, record)
    assert rig.store.starts == [0, 1000, 0]
    assert on_disk(rig, record) == record.checksum


async def test_halves_that_never_fit_end(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.says, rig.store.breaks = [b"\1" * record.size_bytes] * 4, [1000, 1 << 30, 1000]
    with pytest.raises(LoadFailed, match="its record says") as failed:
        await once(loader, record)
    assert failed.value.lasting
    assert rig.store.starts == [0, 1000, 0, 1000]
    nothing_left(rig, loader)


async def test_a_wrong_sum_is_not_tried_again(rig: Rig) -> None:
    """The store lies about what it has: twice the same bytes help nobody."""
    loader, record = await rig.loader(), rig.adapter(0)
    path = rig.remote / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(LoadFailed, match="sha256") as failed:
        await once(loader, record)
    assert failed.value.lasting
    assert rig.store.fetches == 1
    nothing_left(rig, loader)


@pytest.mark.parametrize("length", [0, 1, -1])
async def test_a_file_cut_short_in_the_store(rig: Rig, length: int) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    path = rig.remote / "0.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(LoadFailed, match=f"its record says {record.size_bytes}"):
        await once(loader, record)
    nothing_left(rig, loader)


async def test_an_object_that_shrank_meanwhile(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.breaks, rig.store.failures = [1000], []
    rig.store.says = [b"\1" * record.size_bytes]
    (rig.remote / "0.safetensors").write_bytes(b"short")
    with pytest.raises(LoadFailed, match="5 bytes"):
        await once(loader, record)
    nothing_left(rig, loader)


@pytest.mark.usefixtures("hasty")
async def test_a_store_away_for_a_minute_and_one_away_for_good(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    away = rig.remote.rename(rig.folder / "away")
    waiting = asyncio.create_task(once(loader, record))
    await until(lambda: rig.store.fetches > 5)
    await until(lambda: loader.disk.used_bytes == 0)  # between two tries no room is held: nothing came
    assert not waiting.done()
    away.rename(rig.remote)
    await waiting
    rig.remote.rename(away)
    other = msgspec.structs.replace(record, content_id="0" * 64)
    with pytest.raises(LoadFailed, match="there is no folder") as failed:
        await once(loader, other)
    assert not failed.value.lasting
    assert loader.disk.used_bytes == record.size_bytes
    assert rig.on_disk() == [f"{record.content_id}.safetensors"]
    away.rename(rig.remote)


async def test_what_waits_to_try_again_holds_up_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 30.0)
    loader = await rig.loader()
    stuck = [rig.adapter(seed) for seed in range(4)]
    rig.store.failures = [Unavailable("away")] * 4
    waiting = [asyncio.create_task(once(loader, record)) for record in stuck]
    await until(lambda: rig.store.fetches == 4)
    await once(loader, rig.adapter(5))
    assert not any(task.done() for task in waiting)
    assert loader.on_their_way == 4


def test_pauses_grow_and_begin_anew_with_every_byte() -> None:
    tries, now = Backoff(0.0), 0.0
    pauses: list[float] = []
    while (pause := tries.failed(0, now, 0.5)) is not None:
        pauses.append(pause)
        now += pause
    assert all(0.1 <= pause <= 5 for pause in pauses)
    assert pauses[0] <= 0.2
    assert max(pauses) > 2.4
    assert 75 <= now < 81
    moving = Backoff(0.0)
    for progress in range(1, 100):
        pause = moving.failed(progress, progress * 60.0, 0.5)
        assert pause is not None
        assert pause <= 0.2
    assert moving.failed(99, 99 * 60 + 74, 0.5) is not None
    assert moving.failed(99, 99 * 60 + 75, 0.5) is None


@pytest.mark.real
async def test_the_real_store_breaks_off_and_is_gone_on_with(
    rig: Rig, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection cut twice in the middle, then whole."""
    monkeypatch.setattr(s3_store, "_PIECE_BYTES", 1000)  # the file is small
    record = rig.adapter(0)
    async with Between(store.endpoint, cut_after=[9_000, 9_000]) as between:
        settings = S3Settings(between.url, store.access_key, store.secret_key)
        s3 = open_store(parse_location(f"s3://adapters/{rig.folder.name}"), settings)
        there = s3.root.under("0.safetensors")
        direct = open_store(s3.root, S3Settings(store.endpoint, store.access_key, store.secret_key))
        await asyncio.to_thread(direct.put, rig.remote / "0.safetensors", there, record.checksum)
        loader = await rig.loader(store=s3)
        record = msgspec.structs.replace(record, weights_uri=str(there))
        await once(loader, record)
        assert on_disk(rig, record) == record.checksum
        ranges = [line for line in between.asked if line.lower().startswith("range:")]
        assert len(between.answers) == 3
        assert len(ranges) == 2, between.asked
        assert sum(between.answers) < 1.2 * record.size_bytes, "bytes came twice"
        with pytest.raises(StoreError, match="shorter"), direct.stream(there, 1 << 30, record.size_bytes + 1):
            pass
    assert loader.tier(record) is Tier.RAM
