"""Writes records, in order, and says for certain what became of each: its offset, surely not written, or unknown.

Owns one lane per partition written to: a queue of its own in front of the producer (streams/bus/producer.py), and at
most one batch handed over. So whatever has not been handed over can be withdrawn, and is then surely not written; and
the broker, which remembers a producer's last batches, drops what is sent to it twice.

Ordering: a partition gets its records in the order of the calls. A batch is retried, unchanged, through an outage of up
to `delivery_s`; when it fails for good, everything queued behind it fails too (NotWritten), so that nothing overtakes a
record whose fate is unknown, and the producer is replaced, since its sequence numbers have a hole. A batch of unknown
fate can, at worst, still reach the log later, out of a broker that was frozen.
A crash of this process: what was not acknowledged may or may not be there.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import msgspec
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordListTooLargeError
from aiokafka.partitioner import murmur2
from aiokafka.producer.message_accumulator import BatchBuilder

from schemas.codec import encode
from schemas.topics import Topic
from streams.bus.closing import ended
from streams.bus.errors import BusUnavailable, MaybeWritten, NotWritten
from streams.bus.producer import Life, Producers
from streams.bus.reader import Headers
from streams.bus.settings import KafkaSettings

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 900_000  # the broker takes batches of up to 1 MiB
LOOK_AGAIN_S = 0.05
# What the broker says of a record it would refuse each time: then no earlier try of it was written either.
REFUSALS = (MessageSizeTooLargeError, RecordListTooLargeError)


def partition_of(key: bytes, partitions: int) -> int:
    """Where a record with this key lies, whoever wrote it: Kafka's own default."""
    return int(murmur2(key) & 0x7FFFFFFF) % partitions


@dataclass(frozen=True, slots=True)
class Written:
    partition: int
    offset: int


@dataclass(slots=True, eq=False)
class _Record:
    key: bytes | None
    value: bytes | None
    headers: Headers
    queued_at: float  # monotonic seconds
    future: asyncio.Future[Written]


@dataclass(eq=False)
class _Lane:
    """One partition's records: `queue` is still ours, `handed` is the one batch that aiokafka has."""

    topic: str
    partition: int
    linger_s: float
    queue: deque[_Record] = field(default_factory=deque)
    handed: list[_Record] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    known_to: Life | None = None  # the last one whose producer knew the partition


class Writer:
    """`async with Writer(settings, "tokens") as writer`, or start() and stop(). Starts cleanly while Kafka is away.

    `delivery_s` bounds how long a record waits in the queue, and, from there, how long its batch is retried.
    `may_write` is asked just before records leave the queue: while it says no they stay there, and can be failed.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        name: str,
        delivery_s: float = 60.0,
        max_queued: int = 20_000,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = name
        self._settings = settings
        self._delivery_s = delivery_s
        self._max_queued = max_queued
        self._may_write = may_write
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._queued = 0
        self._producers = Producers(settings, name)
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a producer. It does not notice a broker's death while nothing is written."""
        return self._producers.connected.is_set()

    @property
    def waiting(self) -> int:
        """Records not yet acknowledged."""
        return self._queued + sum(len(lane.handed) for lane in self._lanes.values())

    async def start(self) -> None:
        """Returns at once; records queue up until Kafka answers."""
        self._producers.start()

    async def stop(self, flush_s: float = 5.0) -> None:
        """Delivers what is queued for up to `flush_s`, then fails the rest. Ends within about `flush_s` + 6 s."""
        self._closed = True
        if tasks := [lane.task for lane in self._lanes.values() if lane.task is not None]:
            await asyncio.wait(tasks, timeout=flush_s)
            await asyncio.gather(*(ended(task) for task in tasks))
        for lane in self._lanes.values():
            self._fail(lane, MaybeWritten("the writer was stopped"), NotWritten("the writer was stopped"))
        await self._producers.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def send(
        self,
        topic: Topic,
        value: msgspec.Struct | None,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout_s: float = 5.0,
    ) -> Written:
        """Waits for the acknowledgement. `value` None with a key is a tombstone.

        Raises NotWritten or MaybeWritten (both BusUnavailable) within `timeout_s`; ValueError for a record that no
        broker would take. A cancelled send is withdrawn if it still can be.
        """
        lane, record = self._put(topic, value, key, partition, headers)
        try:
            await asyncio.wait({record.future}, timeout=timeout_s)
        finally:
            withdrawn = not record.future.done() and self._withdraw(lane, record)
        if record.future.done():
            return record.future.result()
        what = f"{lane.topic}/{lane.partition}: not acknowledged within {timeout_s:g} s"
        record.future.cancel()
        raise NotWritten(what) if withdrawn else MaybeWritten(what)

    def send_nowait(
        self,
        topic: Topic,
        value: msgspec.Struct | None,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[Written]:
        """Queues a record; the future ends as `send` does, within 2 * delivery_s. For streams of records in order.

        Raises NotWritten at once when too many records wait.
        """
        return self._put(topic, value, key, partition, headers)[1].future

    def _put(
        self, topic: Topic, value: msgspec.Struct | None, key: str | None, partition: int | None, headers: Headers
    ) -> tuple[_Lane, _Record]:
        key_bytes = None if key is None else key.encode()
        data = None if value is None else encode(topic, value)
        partitions = self._settings.partitions(topic)
        if key_bytes is None and data is None:
            raise ValueError(f"{topic.name}: a record without value needs a key")
        if partition is None:
            if key_bytes is None:
                raise ValueError(f"{topic.name}: give a key or a partition")
            partition = partition_of(key_bytes, partitions)
        if not 0 <= partition < partitions:
            raise ValueError(f"{topic.name}: partition {partition} is not in 0..{partitions - 1}")
        size = len(key_bytes or b"") + len(data or b"") + sum(len(name) + len(told) for name, told in headers)
        if size > MAX_RECORD_BYTES:
            raise ValueError(f"{topic.name}: a record of {size} bytes, and at most {MAX_RECORD_BYTES} fit")
        if self._closed or not self._producers.started:
            raise NotWritten(f"{self.name}: the writer does not run")
        if self._queued >= self._max_queued:
            raise NotWritten(f"{self.name}: {self._queued} records wait already")
        name = self._settings.topic_name(topic)
        lane = self._lanes.setdefault((name, partition), _Lane(name, partition, topic.linger_ms / 1000))
        future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        record = _Record(key_bytes, data, headers, time.monotonic(), future)
        lane.queue.append(record)
        self._queued += 1
        if lane.task is None:
            lane.task = asyncio.create_task(self._pump(lane), name=f"{self.name}: {name}/{partition}")
        return lane, record

    def _withdraw(self, lane: _Lane, record: _Record) -> bool:
        try:
            lane.queue.remove(record)
        except ValueError:
            return False
        self._queued -= 1
        return True

    async def _pump(self, lane: _Lane) -> None:
        """Delivers a lane's records, batch by batch, until none is left."""
        try:
            while lane.queue:
                try:
                    await self._linger(lane)
                    if lane.queue:  # else it was withdrawn meanwhile
                        await self._deliver(lane)
                except BusUnavailable as error:
                    behind = f"{lane.topic}/{lane.partition}: not sent, since a record before it failed: {error}"
                    self._fail(lane, error, NotWritten(behind))
        except Exception as error:
            log.exception("%s: %s/%d", self.name, lane.topic, lane.partition)
            self._fail(lane, MaybeWritten(repr(error)), NotWritten(repr(error)))
        finally:
            lane.task = None

    async def _linger(self, lane: _Lane) -> None:
        """Waits for the first common tick after the oldest record came: batches of all such lanes leave in one request.

        What did not fit into the last batch has waited already.
        """
        if not lane.linger_s or self._closed:
            return
        queued_at = lane.queue[0].queued_at
        left_s = queued_at - queued_at % lane.linger_s + lane.linger_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _deliver(self, lane: _Lane) -> None:
        """One batch. Raises NotWritten or MaybeWritten, which is the fate of `lane.handed`."""
        life = await self._ready(lane)
        if life is None:
            return
        if not self._may_write():
            await asyncio.sleep(LOOK_AGAIN_S)
            return
        batch = life.producer.create_batch()
        self._hand_over(lane, batch)
        if not lane.handed:
            return
        where = f"{lane.topic}/{lane.partition}"
        try:
            acknowledged = await life.producer.send_batch(batch, lane.topic, partition=lane.partition)
        except KafkaError as error:
            self._producers.end(life, error)
            raise NotWritten(f"{where}: {error!r}") from error
        done, _ = await asyncio.wait(
            {acknowledged, life.broken}, timeout=self._delivery_s, return_when=asyncio.FIRST_COMPLETED
        )
        if acknowledged not in done:
            acknowledged.cancel()
            why = life.broken.result() if life.broken.done() else f"not acknowledged within {self._delivery_s:g} s"
            self._producers.end(life, MaybeWritten(f"{where}: {why}"))
            raise MaybeWritten(f"{where}: {why}")
        if (failure := acknowledged.exception()) is not None:
            self._producers.end(life, failure)
            raise (NotWritten if isinstance(failure, REFUSALS) else MaybeWritten)(f"{where}: {failure!r}") from failure
        base = acknowledged.result().offset
        if base < 0:
            # The broker knows the batch by its number but not its place any more.
            raise MaybeWritten(f"{where}: written, but the broker did not say where")
        handed, lane.handed = lane.handed, []
        for index, record in enumerate(handed):
            if not record.future.done():
                record.future.set_result(Written(lane.partition, base + index))

    async def _ready(self, lane: _Lane) -> Life | None:
        """A producer that knows the lane's partition; None to look at the queue again."""
        limit_s = lane.queue[0].queued_at + self._delivery_s - time.monotonic()
        where = f"{lane.topic}/{lane.partition}"
        if limit_s <= 0:
            raise NotWritten(f"{where}: Kafka took no record for {self._delivery_s:g} s")
        life = self._producers.life
        if life is not None and lane.known_to is life:
            return life
        try:
            async with asyncio.timeout(min(limit_s, 1.0)):
                await self._producers.connected.wait()
                life = self._producers.life
                if life is None:
                    return None
                partitions = await life.producer.partitions_for(lane.topic)
        except (TimeoutError, KafkaError):
            await asyncio.sleep(LOOK_AGAIN_S)
            return None
        if lane.partition not in partitions:
            raise NotWritten(f"{where}: the topic has {len(partitions)} partitions only")
        if life.broken.done():
            return None
        lane.known_to = life
        return life

    def _hand_over(self, lane: _Lane, batch: BatchBuilder) -> None:
        """Moves records from the queue into `batch`, as many as fit."""
        while lane.queue:
            record = lane.queue[0]
            if batch.append(timestamp=None, key=record.key, value=record.value, headers=list(record.headers)) is None:
                return
            lane.handed.append(lane.queue.popleft())
            self._queued -= 1

    def _fail(self, lane: _Lane, handed: BusUnavailable, queued: BusUnavailable) -> None:
        for records, error in ((lane.handed, handed), (lane.queue, queued)):
            for record in records:
                if not record.future.done():
                    record.future.set_exception(type(error)(*error.args))  # each its own: raising adds to a traceback
                    record.future.exception()  # a caller that does not look at it has said so by send_nowait
        self._queued -= len(lane.queue)
        lane.handed.clear()
        lane.queue.clear()
