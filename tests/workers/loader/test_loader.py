"""Adapters through the tiers, on real files: once however many wait, checked at each step, failing without a trace."""

import asyncio
import hashlib
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.local.store import Store as EmbeddedStore
from schemas.adapters import AdapterRecord
from schemas.reasons import AdapterStatus, Tier
from schemas.stats import CacheEvent
from streams.adapters.canonical import write_canonical
from streams.adapters.delta import Array, Pair
from streams.adapters.file_store import FileStore
from streams.adapters.locations import Location, parse_location
from streams.adapters.store import Fetched, S3Settings, Unavailable, open_store
from tests.streams.adapters.files import BASE_HASH, TINY
from workers.loader.folders import Folders
from workers.loader.loader import Base, Loader, LoadFailed
from workers.slot_image import Precision, image_bytes, open_image

RANK = 8
IMAGE = image_bytes(TINY, RANK, Precision.F32)


class Gate(FileStore):
    """The folder store, counted; it waits at a gate and fails when told to."""

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.fetches = 0
        self.together = self.most_together = 0
        self.failures: list[Exception] = []
        self._lock = threading.Lock()

    def get(self, location: Location, path: Path, limit_bytes: int) -> Fetched:
        with self._lock:
            self.fetches += 1
            self.together += 1
            self.most_together = max(self.most_together, self.together)
        try:
            assert self.open.wait(30)
            if self.failures:
                raise self.failures.pop(0)
            return super().get(location, path, limit_bytes)
        finally:
            with self._lock:
                self.together -= 1


class Rig:
    """A store with adapters in it, and loaders one after the other on the same folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remote, self.memory, self.data = folder / "remote", folder / "memory", folder / "data"
        self.remote.mkdir()
        self.memory.mkdir()
        self.store = Gate(parse_location(f"file://{self.remote}"))
        self.events: list[CacheEvent] = []
        self._stack = AsyncExitStack()

    def adapter(self, seed: int, dtype: type[np.floating] = np.float32) -> AdapterRecord:
        """Writes a canonical file into the store, with values that `dtype` keeps."""
        values = np.random.default_rng(seed)

        def draw(*size: int) -> Array:
            return values.normal(size=size).astype(dtype).astype(np.float32)

        delta = {
            (layer, matrix): Pair(draw(4, k), draw(d, 4), 2.0)
            for layer in range(TINY.layers)
            for matrix, (k, d) in TINY.matrices().items()
        }
        path = self.remote / f"{seed}.safetensors"
        identity = write_canonical(path, delta, BASE_HASH)
        return AdapterRecord(
            adapter_id=f"acme/support@{seed + 1}",
            customer="acme",
            version=seed + 1,
            base_model_hash=BASE_HASH,
            rank=4,
            alpha=8.0,
            target_modules=["q_proj"],
            size_bytes=path.stat().st_size,
            weights_uri=f"file://{path}",
            checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
            source_uri="",
            source_checksum="",
            content_id=identity,
            status=AdapterStatus.READY,
            command_partition=0,
            command_offset=seed,
            updated_unix_ms=0,
        )

    async def loader(
        self,
        disk: int = 1 << 30,
        ram: int = 1 << 30,
        base: str = BASE_HASH,
        slot_ranks: tuple[int, ...] = (RANK,),
    ) -> Loader:
        folders = Folders(self.data, self.memory)
        loader = Loader(folders, self.store, Base(base, TINY, slot_ranks), disk, ram, self.events.append, 3, 7)
        await loader.start()
        self._stack.push_async_callback(loader.stop)
        return loader

    async def close(self) -> None:
        self.store.open.set()
        await self._stack.aclose()

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in (self.data / "adapters").iterdir())

    def in_memory(self) -> list[str]:
        return sorted(path.name for path in self.memory.rglob("*") if path.is_file())

    def told(self) -> list[tuple[str, Tier, Tier]]:
        return [(event.event, event.tier, event.source) for event in self.events]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.close()


async def once(loader: Loader, record: AdapterRecord) -> Path:
    async with loader.image(record) as path:
        assert open_image(path, record.content_id, TINY, RANK).payload.any()
        return path


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  threads have no event to wait for
            await asyncio.sleep(0.005)


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


async def test_from_the_store_over_the_disk_into_memory(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    assert loader.tier(record) is Tier.REMOTE
    async with loader.image(record) as path:
        assert loader.tier(record) is Tier.RAM
        image = open_image(path, record.content_id, TINY, RANK)
        assert image.scale().all()
        assert loader.ram.pinned() == {record.content_id: 1}
    assert not loader.ram.pinned()
    assert not loader.disk.pinned()
    assert rig.on_disk() == [f"{record.content_id}.safetensors"]
    assert rig.in_memory() == [record.content_id]
    await once(loader, record)
    assert rig.store.fetches == 1
    assert rig.told() == [("load", Tier.DISK, Tier.REMOTE), ("load", Tier.RAM, Tier.REMOTE)]
    assert [(event.bytes, event.replica, event.incarnation) for event in rig.events] == [
        (record.size_bytes, 3, 7),
        (IMAGE, 3, 7),
    ]


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
    assert not loader.ram.pinned()
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
    assert not loader.ram.pinned()
    assert not loader.disk.pinned()


async def test_downloads_are_bounded(rig: Rig) -> None:
    loader = await rig.loader()
    records = [rig.adapter(seed) for seed in range(8)]
    await asyncio.gather(*(once(loader, record) for record in records))
    assert rig.store.fetches == 8
    assert rig.store.most_together <= 2


async def test_the_disk_survives_a_life_and_memory_does_not(rig: Rig) -> None:
    """What a killed life was writing lies about."""
    record, other = rig.adapter(0), rig.adapter(1)
    first = await rig.loader()
    await once(first, record)
    await first.stop()
    (rig.data / "adapters" / ".x-abc.part").write_bytes(b"half")
    (rig.data / "adapters" / f"{other.content_id}.safetensors.part").write_bytes(b"half")
    (rig.data / "adapters" / "notes.txt").write_bytes(b"not ours")
    rig.events.clear()
    second = await rig.loader()
    assert rig.in_memory() == []
    assert rig.on_disk() == sorted([f"{record.content_id}.safetensors", "notes.txt"])
    assert second.tier(record) is Tier.DISK
    assert second.tier(other) is Tier.REMOTE
    await once(second, record)
    assert rig.store.fetches == 1
    assert rig.told() == [("load", Tier.RAM, Tier.DISK)]


@pytest.mark.parametrize("spoil", ["flip", "cut", "swap", "empty", "gone", "unreadable"])
async def test_a_bad_file_on_the_disk_is_fetched_again(rig: Rig, spoil: str) -> None:
    record, other = rig.adapter(0), rig.adapter(1)
    await once(await rig.loader(), record)
    path = rig.data / "adapters" / f"{record.content_id}.safetensors"
    data = path.read_bytes()
    spoilt = {
        "flip": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "cut": data[:-1],
        "swap": (rig.remote / "1.safetensors").read_bytes(),
        "empty": b"",
    }
    path.write_bytes(spoilt.get(spoil, data))
    assert other.content_id != record.content_id
    second = await rig.loader()
    if spoil in ("gone", "unreadable"):
        path.unlink()
    if spoil == "unreadable":
        path.symlink_to(path.name)  # to itself: for root, too, opening it fails
    rig.events.clear()
    await once(second, record)
    assert rig.store.fetches == 2
    assert rig.told() == [
        ("fail", Tier.DISK, Tier.DISK),
        ("load", Tier.DISK, Tier.REMOTE),
        ("load", Tier.RAM, Tier.REMOTE),
    ]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == record.checksum


def _nothing_left(rig: Rig, loader: Loader) -> None:
    assert rig.on_disk() == []
    assert rig.in_memory() == []
    assert (loader.disk.used_bytes, loader.ram.used_bytes) == (0, 0)
    assert not loader.disk.pinned()
    assert not loader.ram.pinned()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checksum": "0" * 64}, "its record says"),
        ({"size_bytes": 100}, "at most 100"),
        ({"size_bytes": 1 << 20}, "its record says"),
        ({"content_id": "0" * 64}, "content_id"),
        ({"content_id": "../../etc/passwd"}, "no sha256"),
        ({"base_model_hash": "c" * 64}, "made for base"),
        ({"rank": 9}, "rank 9"),
        ({"weights_uri": "file:///etc/passwd"}, "not below"),
        ({"weights_uri": "http://example.org/x"}, "s3://bucket/key"),
        ({"weights_uri": "s3://adapters/x"}, "not below"),
        ({"weights_uri": "file:///nowhere/x.safetensors"}, "not below"),
    ],
)
async def test_a_record_that_does_not_fit_its_file(rig: Rig, changes: dict[str, str | int], says: str) -> None:
    loader, record = await rig.loader(), msgspec.structs.replace(rig.adapter(0), **changes)
    with pytest.raises(LoadFailed, match=says):
        await once(loader, record)
    _nothing_left(rig, loader)
    assert [event.event for event in rig.events if event.tier is Tier.RAM] == ["fail"]


async def test_a_file_for_another_base_is_not_laid_out(rig: Rig) -> None:
    """Registered before the base was changed: the record says the new base, the file still the old one."""
    loader = await rig.loader(base="c" * 64)
    record = msgspec.structs.replace(rig.adapter(0), base_model_hash="c" * 64)
    with pytest.raises(LoadFailed, match="base_hash"):
        await once(loader, record)
    _nothing_left(rig, loader)


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
    _nothing_left(rig, loader)
    (rig.remote / "away").rename(rig.remote / "0.safetensors")
    await once(loader, record)


async def test_a_store_that_is_away_for_a_moment_is_tried_again(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.failures = [Unavailable("away"), Unavailable("still")]
    await once(loader, record)
    assert rig.store.fetches == 3
    assert [event.event for event in rig.events] == ["load", "load"]


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


async def test_the_next_life_knows_what_was_used_last(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(2)]
    loader = await rig.loader(ram=IMAGE)
    for n, record in enumerate(records):
        await once(loader, record)
        os.utime(rig.data / "adapters" / f"{record.content_id}.safetensors", (1_000 + n, 1_000 + n))
    await once(loader, records[0])  # from the disk again, since the image made room
    second = await rig.loader()
    assert second.disk.names() == [records[0].content_id, records[1].content_id]


async def test_shared_memory_cleared_by_others_is_filled_again(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    (await once(loader, record)).unlink()
    await once(loader, record)
    assert rig.store.fetches == 1


async def test_a_replaced_life_does_not_take_the_next_ones_images(rig: Rig) -> None:
    record = rig.adapter(0)
    first = await rig.loader()
    await once(first, record)
    second = await rig.loader()
    await once(second, record)
    assert len(rig.in_memory()) == 2
    await first.stop()
    await once(second, record)
    assert len(rig.in_memory()) == 1
    await second.stop()
    assert list(rig.memory.iterdir()) == []


async def test_dead_lives_are_swept_and_nothing_else(rig: Rig) -> None:
    """Whoever may write to shared memory may put anything there under our names."""
    await once(await rig.loader(), rig.adapter(0))
    [alive] = rig.memory.iterdir()
    dead = rig.memory / f"lorafleet-{'0' * 16}-1-{'0' * 16}"
    dead.mkdir()
    (dead / "image").write_bytes(b"left by a worker that was killed")
    others = rig.folder / "others"
    others.mkdir()
    (others / "precious").write_bytes(b"")
    link = rig.memory / f"lorafleet-{'0' * 16}-1-{'1' * 16}"
    link.symlink_to(others)
    (rig.memory / "lorafleet-notes").mkdir()
    await (await rig.loader()).stop()
    assert sorted(rig.memory.iterdir()) == sorted([alive, link, rig.memory / "lorafleet-notes"])
    assert (others / "precious").exists()
    assert len(rig.in_memory()) == 1


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
    await until(lambda: not loader._flights)
    assert not loader.ram.pinned()
    assert not loader.disk.pinned()
    assert loader.ram.used_bytes == IMAGE * len(loader.ram.names()) == IMAGE * len(rig.in_memory())
    assert loader.disk.used_bytes == sum(path.stat().st_size for path in (rig.data / "adapters").iterdir())


KILLED = """
import asyncio, sys
from pathlib import Path
import msgspec
from schemas.adapters import AdapterRecord
from streams.adapters.locations import parse_location
from tests.workers.loader.test_loader import Rig, Folders, Loader, Base, TINY, RANK, BASE_HASH, Gate
folder = Path(sys.argv[1])
records = msgspec.json.decode((folder / "records.json").read_bytes(), type=list[AdapterRecord])

async def main():
    store = Gate(parse_location(f"file://{folder / 'remote'}"))
    loader = Loader(Folders(folder / "data", folder / "memory"), store, Base(BASE_HASH, TINY, (RANK,)), 1 << 30,
                    1 << 30, lambda event: print(event.event, event.tier, flush=True))
    await loader.start()
    for record in records:
        async with loader.image(record):
            pass

asyncio.run(main())
"""


async def test_killed_at_any_moment_the_next_life_serves_all(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(12)]
    (rig.folder / "records.json").write_bytes(msgspec.json.encode(records))
    for lines in (1, 4):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(rig.folder), stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        for _ in range(lines):
            assert await child.stdout.readline()
        child.kill()
        await child.communicate()
    loader = await rig.loader()
    assert rig.in_memory() == []
    assert {loader.tier(record) for record in records} <= {Tier.DISK, Tier.REMOTE}
    assert Tier.DISK in {loader.tier(record) for record in records}
    for record in records:
        await once(loader, record)
    assert "fail" not in [event.event for event in rig.events]


@pytest.mark.real
async def test_from_the_real_store(rig: Rig, store: EmbeddedStore) -> None:
    settings = S3Settings(store.endpoint, store.access_key, store.secret_key)
    s3 = open_store(parse_location(f"s3://adapters/{rig.folder.name}"), settings)
    record = rig.adapter(0)
    there = s3.root.under("0.safetensors")
    s3.put(rig.remote / "0.safetensors", there, record.checksum)
    record = msgspec.structs.replace(record, weights_uri=str(there))
    rig.store = s3  # type: ignore[assignment]
    loader = await rig.loader()
    await once(loader, record)
    rig.store = Gate(parse_location(f"file://{rig.remote}"))
    missing = msgspec.structs.replace(record, content_id="0" * 64, weights_uri=str(s3.root.under("nothing")))
    with pytest.raises(LoadFailed, match="no such object"):
        await once(loader, missing)
