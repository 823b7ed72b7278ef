"""Files and records that are not what they should be: a clear reason, and no trace."""

import hashlib

import msgspec
import pytest

from schemas.reasons import Tier
from tests.workers.loader.rig import Rig, nothing_left, once
from workers.loader.loader import LoadFailed


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
    rig.events.clear()
    second = await rig.loader()  # it sees at once what a header shows, the rest when it is read
    assert second.tier(record) is (Tier.DISK if spoil in ("flip", "gone", "unreadable") else Tier.REMOTE)
    if spoil in ("gone", "unreadable"):
        path.unlink()
    if spoil == "unreadable":
        path.symlink_to(path.name)  # to itself: for root, too, opening it fails
    await once(second, record)
    assert rig.store.fetches == 2
    assert rig.told() == [
        ("fail", Tier.DISK, Tier.DISK),
        ("load", Tier.DISK, Tier.REMOTE),
        ("load", Tier.RAM, Tier.REMOTE),
    ]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == record.checksum


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
    nothing_left(rig, loader)
    assert [event.event for event in rig.events if event.tier is Tier.RAM] == ["fail"]


async def test_a_file_for_another_base_is_not_laid_out(rig: Rig) -> None:
    """Registered before the base was changed: the record says the new base, the file still the old one."""
    loader = await rig.loader(base="c" * 64)
    record = msgspec.structs.replace(rig.adapter(0), base_model_hash="c" * 64)
    with pytest.raises(LoadFailed, match="base_hash"):
        await once(loader, record)
    nothing_left(rig, loader)
