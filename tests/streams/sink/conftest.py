"""A stream to sink, the process that sinks it, and what has arrived."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import clickhouse_connect
import pytest

from infra.local.child import Child, Spec, python
from schemas.topics import CACHE_EVENTS, FINISHED
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from tests.stack import wait_until
from tests.streams.sink.samples import attempt, event, request


class Producer:
    """Writes `count` requests, attempts and cache events each, and remembers how many in all."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.produced = 0

    async def produce(self, count: int) -> None:
        written = []
        for number in range(self.produced, self.produced + count):
            customer, replica = f"c{number % 5}", f"{number % 3}"
            written += [
                self._writer.send_nowait(FINISHED, request(number), key=customer),
                self._writer.send_nowait(FINISHED, attempt(number), key=customer),
                self._writer.send_nowait(CACHE_EVENTS, event(number), key=replica),
            ]
        await asyncio.gather(*written)
        self.produced += count


@dataclass(frozen=True)
class Arrived:
    """Rows and 7-per-record sums; raw, raw without repeats, and rolled up."""

    requests: tuple[int, int, int, int]
    attempts: tuple[int, int, int, int]
    cache_events: tuple[int, int, int, int]

    @classmethod
    def exactly(cls, count: int) -> "Arrived":
        each = (count, count, count, 7 * count)
        return cls(each, each, each)


def arrived(url: str) -> Arrived:
    with clickhouse_connect.get_client(dsn=url) as client:

        def of(table: str, view: str, count: str, sum_: str) -> tuple[int, int, int, int]:
            [(rows, places)] = client.query(
                f"SELECT count(), uniqExact(kafka_partition, kafka_offset) FROM {table}"
            ).result_rows
            [(rolled, sevens)] = client.query(f"SELECT sum({count}), sum({sum_}) FROM {view}").result_rows
            return rows, places, rolled, sevens

        return Arrived(
            of("requests", "tenant_1m", "requests", "output_tokens"),
            of("attempts", "replica_1m", "attempts", "output_tokens"),
            of("cache_events", "cache_1m", "events", "bytes"),
        )


def wait_for_arrival(url: str, count: int, limit_s: float = 60) -> None:
    """All of it, and then nothing more for two flushes."""
    wait_until(lambda: min(arrived(url).requests[0], arrived(url).attempts[0]) >= count, limit_s, "rows")
    wait_until(lambda: arrived(url).cache_events[0] >= count, limit_s, "cache events")


@pytest.fixture
def settings(kafka: str, namespace: str) -> KafkaSettings:
    return KafkaSettings(kafka, namespace=namespace, replica_places=2, gateway_places=2)


@pytest.fixture
async def producer(settings: KafkaSettings) -> AsyncIterator[Producer]:
    await ensure_topics(settings)
    async with Writer(settings, "test") as writer:
        yield Producer(writer)


class Processes:
    """Sinks as processes of their own, in this test's Kafka namespace and database."""

    def __init__(self, kafka: KafkaSettings, url: str, folder: Path) -> None:
        self._env = {
            "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "LORAFLEET_NAMESPACE": kafka.namespace,
            "LORAFLEET_REPLICA_PLACES": "2",
            "LORAFLEET_GATEWAY_PLACES": "2",
            "CLICKHOUSE_URL": url,
        }
        self._folder = folder
        self._numbers = itertools.count()
        self._children: list[Child] = []

    def start(self, module: str = "streams.sink", *arguments: str) -> Child:
        log = self._folder / f"sink{next(self._numbers)}.log"
        child = Child(Spec("sink", python(module, *arguments), log=log, env=self._env))
        self._children.append(child)
        return child

    def stop(self) -> None:
        for child in self._children:
            child.stop()


@pytest.fixture
def processes(settings: KafkaSettings, clickhouse: str, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(settings, clickhouse, tmp_path)
    yield processes
    processes.stop()
