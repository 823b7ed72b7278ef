"""The machine's own bad days: full disk, full shared memory. A clear reason, no trace, and well again by itself."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from schemas.reasons import Tier
from tests.workers.loader.rig import IMAGE, Rig, nothing_left, once
from workers.loader.loader import LoadFailed


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """As a full disk does, the kernel takes the part that fits, and refuses the next write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("lacking", [1, 20_000])
async def test_the_disk_is_full(rig: Rig, lacking: int) -> None:
    """Also when all but the last byte fits: that is told by a count alone."""
    loader, record = await rig.loader(), rig.adapter(0)
    with (
        files_of_at_most(record.size_bytes - lacking),
        pytest.raises(LoadFailed, match=r"^on this machine: the disk tier: ") as failed,
    ):
        await once(loader, record)
    assert not failed.value.lasting
    nothing_left(rig, loader)
    assert [(event.event, event.reason) for event in rig.events] == [("fail", str(failed.value))]
    await once(loader, record)


async def test_shared_memory_is_full(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    assert record.size_bytes < IMAGE - 1
    with (
        files_of_at_most(IMAGE - 1),
        pytest.raises(LoadFailed, match=r"^on this machine: shared memory: ") as failed,
    ):
        await once(loader, record)
    assert not failed.value.lasting
    assert rig.in_memory() == []
    assert (loader.ram.used_bytes, loader.disk.used_bytes) == (0, record.size_bytes)
    assert not loader.ram.leases()
    assert not loader.disk.leases()
    assert loader.tier(record) is Tier.DISK
    await once(loader, record)
    assert rig.store.fetches == 1
