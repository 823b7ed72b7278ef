"""The broker is killed, frozen and brought back under a stream of records."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from schemas.customers import Customer
from schemas.topics import CUSTOMERS, TOKENS
from streams.bus.admin import ensure_topics
from streams.bus.errors import BusUnavailable, MaybeWritten, NotWritten
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.table import Table, TableReader
from streams.bus.writer import Writer, Written
from tests.streams.bus.conftest import Broker
from tests.streams.bus.samples import batch

pytestmark = pytest.mark.real


@dataclass
class Stream:
    """50 records a second to one partition, and what a reader makes of them."""

    writer: Writer
    reader: Reader
    sent: list[asyncio.Future[Written]] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)  # offset, number
    ages: list[float] = field(default_factory=list)
    writing: bool = True

    async def write(self) -> None:
        while self.writing:
            self.sent.append(self.writer.send_nowait(TOKENS, batch(len(self.sent)), partition=0))
            await asyncio.sleep(0.02)

    async def follow(self) -> None:
        while self.writing or len(self.read) < len(self.sent):
            self.read += [(record.offset, record.value.incarnation) for record in await self.reader.poll()]
            self.ages.append(self.reader.last_fetch_age(time.monotonic()))

    async def settle(self) -> None:
        self.writing = False
        results = await asyncio.gather(*self.sent)
        assert [result.offset for result in results] == list(range(len(self.sent)))


async def test_nothing_is_lost_repeated_or_reordered_by_a_kill(broker: Broker, namespace: str) -> None:
    settings = KafkaSettings(broker.bootstrap, namespace=namespace, replica_places=2, gateway_places=2)
    await ensure_topics(settings)
    customers = Table[Customer](CUSTOMERS)
    async with (
        Writer(settings, "test") as writer,
        Writer(settings, "states") as states,
        Reader(settings, {TOKENS: {0: "start"}}, "test", fetch_wait_ms=50) as reader,
        TableReader(settings, [customers], "tables") as tables,
        asyncio.TaskGroup() as group,
    ):
        await states.send(CUSTOMERS, Customer("before", []), key="before")
        await tables.caught_up(20)
        stream = Stream(writer, reader)
        group.create_task(stream.write())
        group.create_task(stream.follow())
        await asyncio.sleep(1)
        before = len(stream.sent)
        broker.kill()
        stream.ages.clear()
        await asyncio.sleep(4)
        assert max(stream.ages) > 3  # the reader knows that it is deaf
        assert str(tables.status) == "degraded"
        assert "before" in customers
        began = time.monotonic()
        with pytest.raises(BusUnavailable):
            await states.send(CUSTOMERS, Customer("during", []), key="during", timeout_s=1.0)
        assert time.monotonic() - began < 3
        broker.start()
        await states.send(CUSTOMERS, Customer("after", []), key="after", timeout_s=60)
        async with asyncio.timeout(60):
            await tables.barrier(60)
            await stream.sent[before + 1]
        assert "after" in customers
        await asyncio.sleep(1)
        async with asyncio.timeout(60):
            await stream.settle()
        assert str(tables.status) == "caught_up"
    assert stream.read == [(n, n) for n in range(len(stream.sent))]
    assert len(stream.sent) > before + 100
    assert stream.ages[-1] < 1


async def test_a_frozen_broker_holds_up_nobody(broker: Broker, namespace: str) -> None:
    settings = KafkaSettings(broker.bootstrap, namespace=namespace, replica_places=2, gateway_places=2)
    await ensure_topics(settings)
    writer = Writer(settings, "test", delivery_s=30)
    await writer.start()
    reader = Reader(settings, {TOKENS: {0: "start", 1: "start"}}, "test")
    await reader.start()
    await writer.send(TOKENS, batch(0), partition=0)
    broker.freeze()
    began = time.monotonic()
    with pytest.raises(MaybeWritten):  # handed over: no one can know
        await writer.send(TOKENS, batch(1), partition=0, timeout_s=0.5)
    with pytest.raises(NotWritten):  # behind it, and withdrawn
        await writer.send(TOKENS, batch(2), partition=0, timeout_s=0.5)
    queued = writer.send_nowait(TOKENS, batch(3), partition=0)
    await asyncio.sleep(7)  # longer than a request may take: connections are given up, the batch is not
    broker.thaw()
    assert (await asyncio.wait_for(queued, 30)).offset == 2
    seen: list[int] = []
    async with asyncio.timeout(30):
        while len(seen) < 3:
            seen += [record.value.incarnation for record in await reader.poll()]
    assert seen == [0, 1, 3]
    broker.freeze()
    late = writer.send_nowait(TOKENS, batch(4), partition=0)
    await asyncio.sleep(0.1)
    behind = writer.send_nowait(TOKENS, batch(5), partition=0)
    await asyncio.gather(writer.stop(flush_s=0.2), reader.stop())
    with pytest.raises(MaybeWritten, match="stopped"):
        await late
    with pytest.raises(NotWritten, match="stopped"):
        await behind
    broker.thaw()
    assert time.monotonic() - began < 60


async def test_a_batch_that_is_given_up_lets_nothing_overtake_it(broker: Broker, namespace: str) -> None:
    settings = KafkaSettings(broker.bootstrap, namespace=namespace, replica_places=2, gateway_places=2)
    await ensure_topics(settings)
    async with Writer(settings, "test", delivery_s=2.0) as writer:
        await writer.send(TOKENS, batch(0), partition=0)
        broker.kill()
        doubtful = writer.send_nowait(TOKENS, batch(1), partition=0)
        await asyncio.sleep(0.2)
        behind = [writer.send_nowait(TOKENS, batch(n), partition=0) for n in range(2, 5)]
        with pytest.raises(MaybeWritten):
            await asyncio.wait_for(doubtful, 10)
        for future in behind:
            with pytest.raises(NotWritten, match="a record before it failed"):
                await asyncio.wait_for(future, 10)
        broker.start()
        # A new producer carries on.
        written = await _until_written(writer)
        async with Reader(settings, {TOKENS: {0: "start"}}, "test") as reader:
            seen: list[int] = []
            async with asyncio.timeout(30):
                while len(seen) < written.offset + 1:
                    seen += [record.value.incarnation for record in await reader.poll()]
    assert seen in ([0, 9], [0, 1, 9])


async def _until_written(writer: Writer) -> Written:
    async with asyncio.timeout(60):
        while True:
            try:
                return await writer.send(TOKENS, batch(9), partition=0, timeout_s=20)
            except NotWritten:
                await asyncio.sleep(0.1)
