"""ClickHouse and Kafka are killed under the sink, logs lose what it had not read, and a second sink comes along."""

import asyncio
import time
from collections.abc import Iterator

import clickhouse_connect
import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition

from infra.clickhouse import schema
from infra.local.child import Child
from infra.local.clickhouse import ClickHouse
from schemas.topics import FINISHED
from streams.bus.admin import ensure_topics
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from tests.stack import Stack, started, wait_until
from tests.streams.bus.conftest import Broker
from tests.streams.sink.conftest import Arrived, Processes, Producer, arrived, wait_for_arrival
from tests.streams.sink.samples import request

pytestmark = pytest.mark.real


class Mortal:
    """A ClickHouse of one's own."""

    def __init__(self, stack: Stack) -> None:
        self._service = ClickHouse(
            stack.home / "mortal-clickhouse", stack.ports.allot("mortal-clickhouse"), stack.home / "mortal.log"
        )
        self.url = self._service.url("numbers")
        self._child = started(self._service)
        schema.apply(self.url)

    def kill(self) -> None:
        self._child.kill()
        wait_until(lambda: self._child.returncode() is not None, 10, "the end")

    def start(self) -> None:
        self._child = Child(self._service.prepare())


@pytest.fixture
def mortal(stack: Stack) -> Iterator[Mortal]:
    mortal = Mortal(stack)
    yield mortal
    mortal.kill()


@pytest.fixture
def broker(stack: Stack) -> Iterator[Broker]:
    broker = Broker(stack, "sink-kafka")
    broker.ensure_running()
    yield broker
    broker.stop()


async def test_clickhouse_and_kafka_are_killed(
    mortal: Mortal, broker: Broker, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = KafkaSettings(broker.bootstrap, namespace=namespace, replica_places=2, gateway_places=2)
    await ensure_topics(settings)
    processes = Processes(settings, mortal.url, tmp_path_factory.mktemp("sinks"))
    async with Writer(settings, "test") as writer:
        producer = Producer(writer)
        mortal.kill()
        sink = processes.start()  # starts without ClickHouse, and waits

        async def stream() -> None:
            for _ in range(150):
                await producer.produce(10)
                await asyncio.sleep(0.1)

        streaming = asyncio.create_task(stream())
        await asyncio.sleep(1)
        for part in (mortal, broker, mortal):
            if part is mortal:
                mortal.start()
                await asyncio.to_thread(wait_until, sink.said_ready, 60, "ready")
                await asyncio.sleep(2.5)
            part.kill()
            await asyncio.sleep(1.5)
            if part is broker:
                broker.start()
        mortal.start()
        await streaming
        await asyncio.to_thread(wait_for_arrival, mortal.url, producer.produced)
    assert producer.produced == 1500
    assert arrived(mortal.url) == Arrived.exactly(1500)
    assert sink.returncode() is None  # it was one process all along
    assert sink.stop() == 0


async def test_records_that_expired_are_counted_and_the_rest_goes_on(
    producer: Producer, processes: Processes, settings: KafkaSettings, clickhouse: str
) -> None:
    await producer.produce(20)
    sink = processes.start()
    await asyncio.to_thread(wait_for_arrival, clickhouse, 20)
    sink.stop()
    await producer.produce(20)
    [partition, before, end] = await _trim(settings, left=3)
    sink = processes.start()
    expected = 40 - (end - 3 - before)  # requests and attempts share a partition
    await asyncio.to_thread(wait_until, lambda: _finished_rows(clickhouse) == 40 + expected, 60, "rows")
    assert f"finished/{partition}: position {before}" in sink.output()
    assert f"{end - 3 - before} records expired before they were read" in sink.output()


async def _trim(settings: KafkaSettings, left: int) -> tuple[int, int, int]:
    """Drops all but the last `left` records of the fullest partition of `finished`: it, half its end, its end."""
    name = settings.topic_name(FINISHED)
    admin = AIOKafkaAdminClient(**settings.client_kwargs())
    await admin.start()
    try:
        async with Reader(settings, {FINISHED: dict.fromkeys(range(8), "end")}, "test") as reader:
            partition, end = max(reader.positions(FINISHED).items(), key=lambda item: item[1])
        await admin.delete_records({TopicPartition(name, partition): RecordsToDelete(end - left)})
    finally:
        await admin.close()
    return partition, end // 2, end


def _finished_rows(url: str) -> int:
    found = arrived(url)
    return found.requests[0] + found.attempts[0]


async def test_a_topic_that_was_made_anew_is_read_from_its_start(
    producer: Producer, processes: Processes, settings: KafkaSettings, clickhouse: str
) -> None:
    await producer.produce(20)
    sink = processes.start()
    await asyncio.to_thread(wait_for_arrival, clickhouse, 20)
    sink.stop()
    admin = AIOKafkaAdminClient(**settings.client_kwargs())
    await admin.start()
    try:
        await admin.delete_topics([settings.topic_name(FINISHED)])
    finally:
        await admin.close()
    await asyncio.sleep(1)
    await ensure_topics(settings)
    async with Writer(settings, "anew") as writer:
        for number in range(20, 25):
            await writer.send(FINISHED, request(number), key=f"c{number % 5}")
    for _ in range(2):
        sink = processes.start()
        await asyncio.to_thread(wait_until, lambda: arrived(clickhouse).requests[0] >= 25, 60, "rows")
        await asyncio.to_thread(wait_until, sink.said_ready, 60, "ready")
        await asyncio.sleep(1.5)
        sink.stop()
    assert (arrived(clickhouse).requests[0], arrived(clickhouse).requests[2]) == (25, 25)


async def test_a_second_sink_ends_one_of_them(producer: Producer, processes: Processes) -> None:
    sinks = [processes.start(), processes.start()]
    for sink in sinks:
        await asyncio.to_thread(wait_until, sink.said_ready, 60, "ready")
    end_s = time.monotonic() + 30
    while all(sink.returncode() is None for sink in sinks):
        assert time.monotonic() < end_s
        await producer.produce(2)
        await asyncio.sleep(0.2)
    [ended] = [sink for sink in sinks if sink.returncode() is not None][:1]
    assert ended.returncode() == 1
    assert "another sink writes" in ended.output()


async def test_a_value_that_no_column_holds_costs_one_row(
    producer: Producer, processes: Processes, settings: KafkaSettings, clickhouse: str
) -> None:
    async with Writer(settings, "bad") as writer:
        await writer.send(FINISHED, msgspec.structs.replace(request(99), prompt_tokens=-5), key="c1")
    await producer.produce(20)
    sink = processes.start()
    await asyncio.to_thread(wait_for_arrival, clickhouse, 20)
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        assert client.query("SELECT count() FROM requests WHERE request_id = 'r99'").result_rows == [(0,)]
    assert "a row that does not fit its columns is left out" in sink.output()
