"""A store over HTTP that is slow, away, breaks off or lies: waiting or a reason, and never a trace."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest

from schemas.adapters import AdapterRecord
from streams.adapters import s3_store
from streams.adapters.locations import parse_location
from streams.adapters.store import S3Settings, Store, open_store
from tests.workers.loader.crooked import Away, Crooked, Cut, Deed, Hangs, NoRanges, Swapped, Whole
from tests.workers.loader.rig import Rig, nothing_left, once
from workers.loader import backoff, download
from workers.loader.loader import Loader, LoadFailed

Start = Callable[..., Crooked]


@pytest.fixture
def crooked(rig: Rig) -> Iterator[Start]:
    """A crooked S3 with the file of adapter 0."""
    with ExitStack() as stack:

        def start(*deeds: Deed, then: Deed = Whole()) -> Crooked:  # noqa: B008  frozen
            server = Crooked((rig.remote / "0.safetensors").read_bytes(), list(deeds), then)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_PIECE_BYTES", 500)  # what has not filled a chunk when the store breaks off is lost
    monkeypatch.setattr(backoff, "AWAY_LIMIT_S", 2.0)
    monkeypatch.setattr(backoff, "FIRST_S", 0.02)
    monkeypatch.setattr(backoff, "LONGEST_S", 0.1)


def store(server: Crooked) -> Store:
    return open_store(parse_location("s3://adapters"), S3Settings(server.url, "key", "secret"))


def in_s3(record: AdapterRecord) -> AdapterRecord:
    return msgspec.structs.replace(record, weights_uri="s3://adapters/0.safetensors")


async def refused(loader: Loader, record: AdapterRecord, says: str) -> LoadFailed:
    """Ten wait, all hear the same; the one error."""
    results = await asyncio.gather(*(once(loader, record) for _ in range(10)), return_exceptions=True)
    assert {type(result) for result in results} == {LoadFailed}
    assert len({str(result) for result in results}) == 1
    assert says in str(results[0])
    assert isinstance(results[0], LoadFailed)
    return results[0]


async def test_a_download_that_breaks_off_goes_on_where_it_was(rig: Rig, crooked: Start) -> None:
    record = in_s3(rig.adapter(0))
    server = crooked(Cut(1_000), Away(), Cut(0), Cut(2_000), Hangs(0.0))
    loader = await rig.loader(store=store(server))
    await once(loader, record)
    assert server.starts == [0, 1_000, 1_000, 1_000, 3_000, 3_000]
    assert rig.on_disk() == [f"{record.content_id}.safetensors"]


async def test_a_store_without_ranges_sends_all_again(rig: Rig, crooked: Start) -> None:
    record = in_s3(rig.adapter(0))
    server = crooked(Cut(1_000), NoRanges())
    await once(await rig.loader(store=store(server)), record)
    assert server.starts == [0, 1_000]


async def test_pieces_that_do_not_fit_together_are_begun_anew(rig: Rig, crooked: Start) -> None:
    record = in_s3(rig.adapter(0))
    size = record.size_bytes
    server = crooked(Swapped(b"x" * 1_000, promised=size), Whole(), Whole())
    await once(await rig.loader(store=store(server)), record)
    assert server.starts == [0, 1_000, 0]


@pytest.mark.parametrize("lie", ["bytes", "short", "promises less", "long"])
async def test_a_store_that_lies_is_asked_once(rig: Rig, crooked: Start, lie: str) -> None:
    record = in_s3(rig.adapter(0))
    data = (rig.remote / "0.safetensors").read_bytes()
    deeds = {
        "bytes": (Swapped(data[:-1] + bytes([data[-1] ^ 1])), "its record says"),
        "short": (Swapped(data[:-1]), "its record says"),
        "promises less": (Swapped(data, promised=100), "100 bytes"),
        "long": (Swapped(data + b"x"), "at most"),
    }
    deed, says = deeds[lie]
    server = crooked(then=deed)
    loader = await rig.loader(store=store(server))
    error = await refused(loader, record, says)
    assert error.lasting
    assert server.starts == [0], "what cannot help was tried again"
    nothing_left(rig, loader)


@pytest.mark.parametrize("deed", [Away(), Cut(0), Cut(1_000), Hangs(0.0)], ids=str)
async def test_a_store_that_stays_bad_is_given_up(rig: Rig, crooked: Start, deed: Deed) -> None:
    """One that always sends the next thousand bytes gets there; the others do not."""
    record = in_s3(rig.adapter(0))
    server = crooked(then=deed)
    loader = await rig.loader(store=store(server))
    if deed == Cut(1_000):
        await once(loader, record)
        assert server.starts == list(range(0, record.size_bytes, 1_000))
        return
    error = await refused(loader, record, "the store")
    assert not error.lasting
    assert 10 < len(server.starts) < 60, "no back-off, or no trying"
    nothing_left(rig, loader)


async def test_a_store_that_is_too_slow_is_asked_anew_for_the_rest(
    rig: Rig, crooked: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is what may be slow: each answer is left after its first piece, and none is lost."""
    record = in_s3(rig.adapter(0))
    monkeypatch.setattr(download, "_PATIENCE_S", -1)
    server = crooked()
    await once(await rig.loader(store=store(server)), record)
    assert server.starts == list(range(0, record.size_bytes, 500))


async def test_a_folder_that_is_gone(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    os.rename(rig.data / "adapters", rig.data / "elsewhere")
    await refused(loader, record, "No such file")
    os.rename(rig.data / "elsewhere", rig.data / "adapters")
    nothing_left(rig, loader)
    await once(loader, record)
