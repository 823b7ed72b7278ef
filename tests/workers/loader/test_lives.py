"""What one life leaves, the next takes over if it is right, and sweeps if it is not."""

import asyncio
import os
import sys

import msgspec

from schemas.reasons import Tier
from tests.workers.loader.rig import IMAGE, Rig, once


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


async def test_the_next_life_knows_what_was_used_last(rig: Rig) -> None:
    records = [rig.adapter(seed) for seed in range(2)]
    loader = await rig.loader(ram=IMAGE)
    for n, record in enumerate(records):
        await once(loader, record)
        os.utime(rig.data / "adapters" / f"{record.content_id}.safetensors", (1_000 + n, 1_000 + n))
    await once(loader, records[0])  # from the disk again, since the image made room
    second = await rig.loader()
    assert second.disk.names() == [records[0].content_id, records[1].content_id]


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


KILLED = """
import asyncio, sys
from pathlib import Path
import msgspec
from schemas.adapters import AdapterRecord
from streams.adapters.locations import parse_location
from tests.workers.loader.rig import Folders, Loader, Base, TINY, RANK, BASE_HASH, Gate
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
