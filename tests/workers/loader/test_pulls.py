"""What a replica owns comes to it by itself, most used first, in the way of nobody."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping

import msgspec
import pytest

from schemas.adapters import AdapterRecord
from schemas.placement import OwnerPlan
from schemas.reasons import AdapterStatus, Tier
from streams.adapters.store import Unavailable
from streams.placement.rendezvous import ranked
from tests.streams.adapters.files import BASE_HASH, TINY
from tests.workers.loader.rig import IMAGE, RANK, Rig, once, until
from workers.loader import backoff, pulls
from workers.loader.folders import Folders
from workers.loader.images import Base
from workers.loader.loader import Loader
from workers.loader.pulls import Pulls


class Known:
    """A catalogue in the test's own hands."""

    def __init__(self, *records: AdapterRecord) -> None:
        self.records: dict[str, AdapterRecord] = {}
        self.plans: Mapping[str, OwnerPlan] = {}
        self.requests: dict[str, float] = {}
        self.live = frozenset({0})
        self.version = 0
        for record in records:
            self.add(record)

    def add(self, record: AdapterRecord) -> None:
        self.records[record.adapter_id] = record
        self.version += 1

    def live_replicas(self, base_hash: str) -> frozenset[int]:
        assert base_hash == BASE_HASH
        return self.live


class Owner:
    """A replica's pulls; `settled` makes two rounds, so that the live replicas count."""

    def __init__(self, rig: Rig, loader: Loader, known: Known, bytes_per_s: float = 1e12) -> None:
        self.thrashing: list[Tier] = []
        self.pulls = Pulls(
            0,
            known,
            loader,
            Folders(rig.data, rig.memory),
            Base(BASE_HASH, TINY, (RANK,)),
            lambda _: self.thrashing,
            bytes_per_s,
        )
        self.now = time.monotonic()

    async def settled(self) -> None:
        for _ in range(2):
            self.now += 10
            await self.pulls.round(self.now)


async def test_what_is_owned_comes_and_nothing_else(rig: Rig) -> None:
    known = Known(*(rig.adapter(seed) for seed in range(12)))
    known.live = frozenset(range(4))
    loader = await rig.loader()
    owner = Owner(rig, loader, known)
    await owner.settled()
    owned = {name for name in known.records if 0 in ranked(name, known.live)[:2]}
    assert 0 < len(owned) < 12
    assert {name for name, record in known.records.items() if loader.tier(record) is Tier.RAM} == owned
    assert rig.store.fetches == len(owned)
    assert owner.pulls.missing == 0
    assert not loader.ram.leases()
    assert not loader.disk.leases()


async def test_a_new_adapter_and_a_new_place_are_followed(rig: Rig) -> None:
    one, two = rig.adapter(0), rig.adapter(1)
    known, loader = Known(one), await rig.loader()
    owner = Owner(rig, loader, known)
    await owner.settled()
    assert loader.tier(one) is Tier.RAM
    known.add(two)
    await owner.pulls.round(owner.now)
    assert loader.tier(two) is Tier.RAM
    known.live = frozenset({1, 2})  # this replica takes no work any more
    await owner.settled()
    known.add(rig.adapter(2))
    await owner.settled()
    assert rig.store.fetches == 2


async def test_retired_adapters_are_not_brought(rig: Rig) -> None:
    retired = msgspec.structs.replace(rig.adapter(0), status=AdapterStatus.RETIRED)
    loader = await rig.loader()
    await Owner(rig, loader, Known(retired)).settled()
    assert loader.tier(retired) is Tier.REMOTE


async def test_the_most_used_come_into_memory_and_the_next_onto_the_disk(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(6)]
    known = Known(*records)
    known.requests = {record.adapter_id: float(n) for n, record in enumerate(records)}
    loader = await rig.loader(disk=4 * records[0].size_bytes, ram=2 * IMAGE)
    owner = Owner(rig, loader, known)
    for _ in range(3):
        await owner.settled()
    assert [loader.tier(record) for record in records] == [
        Tier.REMOTE, Tier.REMOTE, Tier.DISK, Tier.DISK, Tier.RAM, Tier.RAM,
    ]  # fmt: skip
    assert "evict" not in [event.event for event in rig.events], "one that is owned made way for another"
    assert rig.store.fetches == 4
    assert owner.pulls.missing == 4


async def test_what_others_own_makes_way(rig: Rig) -> None:
    strangers, records = [rig.adapter(seed) for seed in range(3)], [rig.adapter(seed) for seed in range(3, 6)]
    loader = await rig.loader(disk=3 * records[0].size_bytes, ram=3 * IMAGE)
    for stranger in strangers:
        await once(loader, stranger)
    await Owner(rig, loader, Known(*records)).settled()
    assert [loader.tier(record) for record in records] == [Tier.RAM] * 3
    assert [loader.tier(stranger) for stranger in strangers] == [Tier.REMOTE] * 3


async def test_a_request_takes_the_place_of_what_was_only_pulled(rig: Rig) -> None:
    records, stranger = [rig.adapter(seed) for seed in range(3)], rig.adapter(3)
    loader = await rig.loader(ram=3 * IMAGE)
    known = Known(*records)
    known.requests = {record.adapter_id: float(n) for n, record in enumerate(records)}
    await Owner(rig, loader, known).settled()
    await once(loader, stranger)
    assert [loader.tier(record) for record in records] == [Tier.DISK, Tier.RAM, Tier.RAM]


async def test_a_restart_brings_back_first_what_was_used_most(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(4)]
    known = Known(*records)
    first = await rig.loader()
    before = Owner(rig, first, known)
    for n, record in enumerate(records):
        await once(first, record)
        for _ in range((3 * n) % 4 + 1):  # 1, 4, 3, 2 times
            before.pulls.usage.use(record.content_id, before.now)
    before.now += pulls.TOUCH_S
    await before.settled()
    await first.stop()
    second = await rig.loader(ram=2 * IMAGE)
    await Owner(rig, second, known).settled()
    assert [second.tier(record) for record in records] == [Tier.DISK, Tier.RAM, Tier.RAM, Tier.DISK]
    assert rig.store.fetches == 4


async def test_while_loads_chase_evictions_nothing_is_pulled(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    owner = Owner(rig, loader, Known(record))
    owner.thrashing = [Tier.GPU]
    await owner.settled()
    assert rig.store.fetches == 0
    assert owner.pulls.missing == 1
    owner.thrashing = []
    await owner.settled()
    assert loader.tier(record) is Tier.RAM


async def test_a_request_that_joins_a_slow_pull_makes_it_fast(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.adapters.file_store.CHUNK_BYTES", 4096)
    loader, record = await rig.loader(), rig.adapter(0)
    owner = Owner(rig, loader, Known(record), bytes_per_s=record.size_bytes / 20)
    await owner.pulls.round(owner.now)
    pulling = asyncio.create_task(owner.pulls.round(owner.now + 10))
    await until(lambda: rig.store.fetches == 1)
    await asyncio.sleep(0.3)
    assert loader.tier(record) is Tier.REMOTE, "not slow"
    began = time.monotonic()
    await once(loader, record)
    assert time.monotonic() - began < 3
    assert rig.store.fetches == 1, "a second download"
    pulling.cancel()


async def test_requests_do_not_queue_behind_pulls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.adapters.file_store.CHUNK_BYTES", 4096)
    loader, record, asked = await rig.loader(), rig.adapter(0), [rig.adapter(1), rig.adapter(2)]
    owner = Owner(rig, loader, Known(record), bytes_per_s=record.size_bytes / 20)
    await owner.pulls.round(owner.now)
    pulling = asyncio.create_task(owner.pulls.round(owner.now + 10))
    await until(lambda: rig.store.fetches == 1)
    await asyncio.gather(*(once(loader, one) for one in asked))
    assert loader.tier(record) is Tier.REMOTE
    pulling.cancel()


@pytest.mark.parametrize("lasting", [True, False])
async def test_what_failed(rig: Rig, monkeypatch: pytest.MonkeyPatch, lasting: bool) -> None:
    monkeypatch.setattr(backoff, "AWAY_LIMIT_S", 0.0)
    right = rig.adapter(0)
    wrong = msgspec.structs.replace(right, checksum="0" * 64) if lasting else right
    rig.store.failures = [] if lasting else [Unavailable("away")]
    loader, known = await rig.loader(), Known(wrong)
    owner = Owner(rig, loader, known)
    await owner.settled()
    await owner.pulls.round(owner.now)
    assert rig.store.fetches == 1, "tried again at once"
    owner.now += pulls.AGAIN_S
    await owner.settled()
    assert loader.tier(right) is (Tier.REMOTE if lasting else Tier.RAM)
    assert rig.store.fetches == (1 if lasting else 2)
    known.add(right)
    await owner.settled()
    assert loader.tier(right) is Tier.RAM


async def test_tokens_do_not_wait_while_thousands_are_looked_at(rig: Rig) -> None:
    record = rig.adapter(0)
    known = Known(*(msgspec.structs.replace(record, adapter_id=f"acme/x@{n}", rank=99) for n in range(5000)))
    known.live = frozenset(range(26))
    owner = Owner(rig, await rig.loader(), known)
    longest = 0.0

    async def tick(over: Callable[[], bool]) -> None:
        nonlocal longest
        while not over():
            began = time.thread_time()  # not what others take of the processor
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    looking = asyncio.create_task(owner.settled())
    gc.disable()  # a worker's is small, and frozen; a test run's is not
    try:
        await tick(looking.done)
    finally:
        gc.enable()
    assert longest < 0.05
    assert rig.store.fetches == 0
