"""kill -9 in each phase of a load: the next life finds nothing that is half, sweeps what is left, and serves."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from schemas.reasons import Tier
from tests.workers.loader.dying import PHASES
from tests.workers.loader.rig import Rig, nothing_left, once
from workers.loader import folders

ON_THE_DISK = PHASES.index("on the disk")
IN_MEMORY = PHASES.index("in memory")


@pytest.mark.parametrize("phase", PHASES)
async def test_killed_in_each_phase_of_a_load(rig: Rig, phase: str) -> None:
    record, at = rig.adapter(0), PHASES.index(phase)
    (rig.folder / "record.json").write_bytes(msgspec.json.encode(record))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.workers.loader.dying", str(rig.folder), phase, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), 30) == b"there\n"
    child.kill()
    await child.communicate()
    names = [path.name for path in (rig.data / "adapters").iterdir()]
    assert names == [f"{record.content_id}.safetensors{'' if at >= ON_THE_DISK else '.part'}"]
    assert (record.content_id in rig.in_memory()) == (at >= IN_MEMORY)

    loader = await rig.loader()
    assert rig.in_memory() == []
    assert len(list(rig.memory.iterdir())) == 1, "the dead life's folder"
    if at < ON_THE_DISK:
        nothing_left(rig, loader)
    assert loader.tier(record) is (Tier.DISK if at >= ON_THE_DISK else Tier.REMOTE)
    assert loader.disk.used_bytes == (record.size_bytes if at >= ON_THE_DISK else 0)
    await once(loader, record)
    assert rig.store.fetches == (0 if at >= ON_THE_DISK else 1)
    assert "fail" not in [event.event for event in rig.events]
    assert not loader.ram.leases()
    assert not loader.disk.leases()


def test_a_part_is_never_where_a_whole_file_is(tmp_path: Path) -> None:
    there = folders.Folders(tmp_path)
    assert there.part("0" * 64) != there.disk("0" * 64)
