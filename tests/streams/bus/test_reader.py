import asyncio
import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition

from infra.local.ports import pick
from schemas.topics import CUSTOMERS, TOKENS
from streams.bus.admin import ensure_topics
from streams.bus.errors import OffsetLost
from streams.bus.reader import Reader, Record
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from tests.streams.bus.samples import batch


async def take(reader: Reader, count: int) -> list[Record]:
    taken: list[Record] = []
    async with asyncio.timeout(30):
        while len(taken) < count:
            taken += await reader.poll()
    return taken


@pytest.mark.real
async def test_reads_from_a_number_the_start_or_the_end(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    async with Writer(settings, "test") as writer:
        for partition in range(3):
            for n in range(5):
                await writer.send(TOKENS, batch(n), partition=partition)
        async with Reader(settings, {TOKENS: {0: "start", 1: 3, 2: "end"}}, "test") as reader:
            assert reader.positions(TOKENS) == {0: 0, 1: 3, 2: 5}
            records = await take(reader, 7)
            await writer.send(TOKENS, batch(5), partition=2)
            records += await take(reader, 1)
            assert reader.positions(TOKENS) == {0: 5, 1: 5, 2: 6}
            assert await reader.end_offsets(TOKENS) == {0: 5, 1: 5, 2: 6}
            reader.seek(TOKENS, 1, 4)
            assert [r.offset for r in await take(reader, 1)] == [4]
            reader.seek(TOKENS, 2, 0)
            assert await reader.seek_to_end(TOKENS, 2) == 6
    read = {p: [r.value.incarnation for r in records if r.partition == p] for p in range(3)}
    assert read == {0: [0, 1, 2, 3, 4], 1: [3, 4], 2: [5]}


@pytest.mark.real
async def test_an_idle_reader_knows_that_it_can_hear(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    async with Reader(settings, {TOKENS: {0: "end", 1: "end"}}, "test", fetch_wait_ms=50) as reader:
        assert reader.last_fetch_age(time.monotonic()) == float("inf")
        ages = []
        for _ in range(10):
            await reader.poll(0.1)
            ages.append(reader.last_fetch_age(time.monotonic()))
        assert max(ages[2:]) < 1.0


@pytest.mark.real
async def test_what_cannot_be_decoded_is_skipped_and_counted(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    producer = AIOKafkaProducer(**settings.client_kwargs())
    await producer.start()
    try:
        await producer.send_and_wait(settings.topic_name(CUSTOMERS), b'{"customer": 7}', key=b"a", partition=0)
        await producer.send_and_wait(settings.topic_name(CUSTOMERS), b"{}", key=b"\xff", partition=0)
        await producer.send_and_wait(
            settings.topic_name(CUSTOMERS), b'{"customer": "b", "keys": [], "new": 1}', key=b"b", partition=0
        )
    finally:
        await producer.stop()
    async with Reader(settings, {CUSTOMERS: {0: "start"}}, "test") as reader:
        [record] = await take(reader, 1)
        assert record.key == "b"
        assert reader.undecodable == {"customers": 2}
        assert reader.positions(CUSTOMERS) == {0: 3}


@pytest.mark.real
@pytest.mark.parametrize("position", [1, 99])
async def test_a_position_outside_the_log_is_told_to_the_owner(settings: KafkaSettings, position: int) -> None:
    await ensure_topics(settings)
    async with Writer(settings, "test") as writer:
        for n in range(5):
            await writer.send(TOKENS, batch(n), partition=0)
    admin = AIOKafkaAdminClient(**settings.client_kwargs())
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(settings.topic_name(TOKENS), 0): RecordsToDelete(3)})
    finally:
        await admin.close()
    async with Reader(settings, {TOKENS: {0: position}}, "test") as reader:
        for _ in range(2):  # it stays lost until the owner has decided
            with pytest.raises(OffsetLost) as caught:
                await take(reader, 1)
            lost = caught.value
            assert (lost.topic, lost.partition, lost.position, lost.earliest, lost.end) == ("tokens", 0, position, 3, 5)
        reader.seek(TOKENS, 0, lost.earliest)
        assert [r.offset for r in await take(reader, 2)] == [3, 4]


async def test_a_broker_that_is_away_neither_fails_nor_blocks() -> None:
    reader = Reader(KafkaSettings(f"127.0.0.1:{pick(set())}"), {TOKENS: {0: 7}}, "test")
    assert await reader.poll(0.1) == []
    assert reader.last_fetch_age(time.monotonic()) == float("inf")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await reader.start()
    await reader.stop()
