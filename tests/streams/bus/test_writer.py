import asyncio
import logging
import time

import pytest

from infra.local.ports import pick
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role, Tier
from schemas.stats import CacheEvent
from schemas.topics import ADAPTERS, CACHE_EVENTS, CUSTOMERS, TOKENS, USAGE
from streams.bus.admin import ensure_topics
from streams.bus.errors import BusUnavailable, NotWritten
from streams.bus.producer import MAX_BATCH_BYTES
from streams.bus.reader import Reader, Record
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer, Written
from tests.streams.bus.samples import batch


@pytest.mark.real
async def test_offsets_come_back_in_the_order_of_the_calls(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    async with Writer(settings, "test") as writer:
        assert await writer.send(TOKENS, batch(0), partition=1) == Written(1, 0)
        written = [writer.send_nowait(TOKENS, batch(n), partition=1) for n in range(1, 2001)]
        assert [w.offset for w in await asyncio.gather(*written)] == list(range(1, 2001))
        assert writer.waiting == 0


@pytest.mark.real
async def test_large_and_small_records_keep_their_order(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    keys = [ApiKey("a" * 64, "h" * size, Role.CUSTOMER) for size in (1, 700_000, 10, 200_000, 100_000, 1)]
    async with Writer(settings, "test") as writer, Reader(settings, {CUSTOMERS: {0: "start"}}, "test") as reader:
        written = [writer.send_nowait(CUSTOMERS, Customer(str(n), [key]), key=str(n)) for n, key in enumerate(keys)]
        await asyncio.gather(*written)
        found: list[str] = []
        async for records in reader:
            found += [record.key for record in records if record.key is not None]
            if len(found) == len(keys):
                break
    assert found == [str(n) for n in range(len(keys))]


@pytest.mark.real
async def test_a_key_goes_where_other_clients_would_put_it(settings: KafkaSettings) -> None:
    """Faust and the console tools use Kafka's murmur2: places computed with the Java client's hash."""
    await ensure_topics(settings)
    async with Writer(settings, "test") as writer:
        # murmur2 of "foobar" and "21" as in Kafka's own UtilsTest: -790332482 and -973932308
        for key, hashed in (("foobar", -790332482), ("21", -973932308)):
            written = await writer.send(ADAPTERS, None, key=key)
            assert written.partition == (hashed & 0x7FFFFFFF) % 8


@pytest.mark.real
async def test_what_no_broker_would_take_is_refused_at_once(settings: KafkaSettings) -> None:
    async with Writer(settings, "test") as writer:
        with pytest.raises(ValueError, match="partition 4 is not in"):
            await writer.send(TOKENS, batch(0), partition=4)
        with pytest.raises(ValueError, match="a key or a partition"):
            await writer.send(TOKENS, batch(0))
        with pytest.raises(ValueError, match="needs a key"):
            await writer.send(CUSTOMERS, None, partition=0)
        with pytest.raises(ValueError, match="at most"):
            await writer.send(CUSTOMERS, Customer("x" * 900_000, []), key="x")


@pytest.mark.real
async def test_a_topic_that_comes_late_gets_what_was_queued(settings: KafkaSettings) -> None:
    async with Writer(settings, "test") as writer:
        early = writer.send_nowait(TOKENS, batch(0), partition=0)
        with pytest.raises(NotWritten):
            await writer.send(USAGE, None, key="a", timeout_s=0.5)
        await ensure_topics(settings)
        assert await early == Written(0, 0)


async def test_a_broker_that_is_away_costs_bounded_time_and_writes_nothing() -> None:
    writer = Writer(KafkaSettings(f"127.0.0.1:{pick(set())}"), "test", delivery_s=1.0, max_queued=10)
    await writer.start()
    began = time.monotonic()
    with pytest.raises(NotWritten, match="not acknowledged within"):
        await writer.send(TOKENS, batch(0), partition=0, timeout_s=0.3)
    assert writer.waiting == 0
    queued = [writer.send_nowait(TOKENS, batch(n), partition=0) for n in range(10)]
    with pytest.raises(NotWritten, match="10 records wait already"):
        writer.send_nowait(TOKENS, batch(11), partition=0)
    for result in await asyncio.gather(*queued, return_exceptions=True):
        assert isinstance(result, NotWritten)
        assert result.written is False
    await writer.stop(flush_s=0.1)
    assert time.monotonic() - began < 15
    with pytest.raises(BusUnavailable, match="does not run"):
        writer.send_nowait(TOKENS, batch(0), partition=0)


async def test_stop_fails_what_is_queued() -> None:
    writer = Writer(KafkaSettings(f"127.0.0.1:{pick(set())}"), "test")
    await writer.start()
    queued = writer.send_nowait(TOKENS, batch(0), partition=0)
    sending = asyncio.create_task(writer.send(TOKENS, batch(1), partition=1))
    await asyncio.sleep(0.05)
    await writer.stop(flush_s=0.1)
    for fate in (queued, sending):
        with pytest.raises(NotWritten, match="stopped"):
            await fate


async def test_stop_ends_at_whatever_moment_it_comes() -> None:
    nowhere = KafkaSettings(f"127.0.0.1:{pick(set())}")
    for moment in range(60):
        writer = Writer(nowhere, "test")
        await writer.start()
        queued = writer.send_nowait(TOKENS, batch(0), partition=0)
        await asyncio.sleep(moment / 1000)
        async with asyncio.timeout(6):
            await writer.stop(flush_s=0)
        assert queued.exception() is not None


@pytest.mark.real
async def test_a_topic_that_lingers_sends_at_its_ticks_and_in_order(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    linger_s = CACHE_EVENTS.linger_ms / 1000
    event = CacheEvent(0, 1, 2, "acme/a@1", "c", "load", Tier.RAM, Tier.DISK, 1, 1.0)
    async with Writer(settings, "test") as writer:
        assert (await writer.send(CACHE_EVENTS, event, key="1")).offset == 0
        began = time.monotonic()
        for first in (1, 4, 7):
            written = [writer.send_nowait(CACHE_EVENTS, event, key="1") for _ in range(3)]
            assert [w.offset for w in await asyncio.gather(*written)] == [first, first + 1, first + 2]
        assert time.monotonic() - began > 2 * linger_s
        last = writer.send_nowait(CACHE_EVENTS, event, key="1")
    assert (await last).offset == 10  # a writer that ends waits for no tick


@pytest.mark.real
async def test_a_record_that_is_withdrawn_while_it_lingers_is_no_fault(
    settings: KafkaSettings, caplog: pytest.LogCaptureFixture
) -> None:
    await ensure_topics(settings)
    event = CacheEvent(0, 1, 2, "acme/a@1", "c", "load", Tier.RAM, Tier.DISK, 1, 1.0)
    async with Writer(settings, "test") as writer:
        assert (await writer.send(CACHE_EVENTS, event, key="1")).offset == 0  # just after a tick
        with pytest.raises(NotWritten):
            await writer.send(CACHE_EVENTS, event, key="1", timeout_s=0.01)
        await asyncio.sleep(2 * CACHE_EVENTS.linger_ms / 1000)
        assert (await writer.send(CACHE_EVENTS, event, key="1")).offset == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.real
async def test_a_backlog_waits_for_one_tick_only(settings: KafkaSettings) -> None:
    """Else a worker that ends after an outage would leave rows behind: each batch holds 256 KiB."""
    await ensure_topics(settings)
    event = CacheEvent(0, 1, 2, "acme/a@1", "c" * 2000, "load", Tier.RAM, Tier.DISK, 1, 1.0)
    async with Writer(settings, "test") as writer:
        await writer.send(CACHE_EVENTS, event, key="1")
        began = time.monotonic()
        await asyncio.gather(*[writer.send_nowait(CACHE_EVENTS, event, key="1") for _ in range(6000)])
        batches = 6000 * 2000 / MAX_BATCH_BYTES
        assert time.monotonic() - began < batches * CACHE_EVENTS.linger_ms / 1000 / 2


@pytest.mark.real
async def test_what_must_not_be_written_yet_stays_in_the_queue(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    allowed = True
    writer = Writer(settings, "test", may_write=lambda: allowed)
    await writer.start()
    assert await writer.send(TOKENS, batch(0), partition=1) == Written(1, 0)
    allowed = False
    with pytest.raises(NotWritten):
        await writer.send(TOKENS, batch(1), partition=1, timeout_s=0.3)
    waits = writer.send_nowait(TOKENS, batch(2), partition=1)
    await asyncio.sleep(0.3)
    assert not waits.done()
    allowed = True
    assert await waits == Written(1, 1)
    allowed = False
    never = writer.send_nowait(TOKENS, batch(3), partition=1)
    await writer.stop(flush_s=0.3)
    assert isinstance(never.exception(), NotWritten)


@pytest.mark.real
async def test_headers_come_with_their_record(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    headers = [("traceparent", b"a"), ("traceparent", b"b"), ("empty", b"")]
    async with Writer(settings, "test") as writer, Reader(settings, {TOKENS: {0: "end"}}, "test") as reader:
        await writer.send(TOKENS, batch(1), partition=0, headers=headers)
        await writer.send(TOKENS, batch(2), partition=0)
        records: list[Record] = []
        while len(records) < 2:
            records += await reader.poll()
        with pytest.raises(ValueError, match="bytes"):
            writer.send_nowait(TOKENS, batch(3), partition=0, headers=[("h", b"x" * 1_000_000)])
    assert [list(record.headers) for record in records] == [headers, []]
