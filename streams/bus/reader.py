"""Reads assigned partitions from known positions, through outages, and knows whether it can hear.

Owns one aiokafka consumer at a time and, apart from it, its own positions: a consumer that gets no answer for `stale_s`
is replaced, and the new one seeks to these positions, never to the end. No groups, no offset reset: a position outside
the log raises OffsetLost to the owner. Ordering: within a partition, the log's; none across partitions.
A crash loses the positions: the owner says where to start.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from schemas.codec import UndecodableRecord, decode
from schemas.topics import Topic
from streams.bus.closing import close_consumer
from streams.bus.errors import BusUnavailable, OffsetLost
from streams.bus.settings import KafkaSettings

log = logging.getLogger(__name__)

Start = int | Literal["start", "end"]
Headers = Sequence[tuple[str, bytes]]  # of a record
CONNECT_LIMIT_S = 10.0
BACKOFF_S = (0.1, 1.0)


class Record(msgspec.Struct, frozen=True):
    """`value` is typed as `topic.value`; None is a tombstone. `timestamp_ms`: the record's, unix."""

    topic: Topic
    partition: int
    offset: int
    key: str | None
    value: Any
    timestamp_ms: int
    headers: Headers = ()


class Reader:
    """`async with Reader(settings, {TOKENS: {3: "end"}}, "replies") as reader: async for records in reader: ...`

    `fetch_wait_ms`: how long the broker holds an empty answer. A long one saves idle work, and delays seeks and
    end_offsets. New data is answered at once, but for one case: a partition whose last records have not been polled yet
    is left out of the next fetch, and what comes for it meanwhile waits until that fetch has ended.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        assignments: Mapping[Topic, Mapping[int, Start]],
        name: str,
        *,
        fetch_wait_ms: int = 100,
        max_records: int = 500,
        stale_s: float = 3.0,
    ) -> None:
        self.name = name
        self.undecodable: Counter[str] = Counter()  # by topic
        self._settings = settings
        self._topics = {settings.topic_name(topic): topic for topic in assignments}
        self._starts: dict[TopicPartition, Start] = {
            TopicPartition(settings.topic_name(topic), partition): start
            for topic, partitions in assignments.items()
            for partition, start in partitions.items()
        }
        self._positions: dict[TopicPartition, int] = {}
        self._fetch_wait_ms = fetch_wait_ms
        self._max_records = max_records
        self._stale_s = stale_s
        self._consumer: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._opened_at = 0.0
        self._seen: dict[TopicPartition, int] = {}  # aiokafka's time of the last fetch, unix ms
        self._seen_at = 0.0  # when that was last looked at, monotonic
        self._fetched_at: dict[TopicPartition, float] = {}  # monotonic
        self._backoff_s = BACKOFF_S[0]
        self._told = False
        self._closed = False

    async def start(self) -> None:
        """Waits, for ever, until Kafka has answered and every start position is known."""
        while not await self._open():
            await self._back_off(BACKOFF_S[1])

    async def stop(self) -> None:
        """Ends within about 4 s."""
        self._closed = True
        await self._drop()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def __aiter__(self) -> AsyncIterator[list[Record]]:
        while not self._closed:
            if records := await self.poll():
                yield records

    async def poll(self, timeout_s: float = 0.25) -> list[Record]:
        """The next records, [] after about `timeout_s`, or after a failed attempt to connect (at most about 10 s).

        Raises OffsetLost. The positions have passed what is returned.
        """
        if self._consumer is None and not await self._open():
            await self._back_off(timeout_s)
            return []
        consumer = self._consumer
        assert consumer is not None
        try:
            batches = await consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=self._max_records)
        except OffsetOutOfRangeError as error:
            [(at, position)] = error.args[0].items()
            await self._raise_lost(consumer, at, position)
            return []
        except KafkaError as error:
            log.warning("%s: consumer replaced: %r", self.name, error)
            await self._drop()
            await self._back_off(timeout_s)
            return []
        for at in batches or self._starts:
            # aiokafka's position, not the last record's: compaction leaves holes.
            self._positions[at] = await consumer.position(at)
        now = time.monotonic()
        self._look(consumer, now)
        heard_at = min(max(self._opened_at, self._fetched_at.get(at, 0.0)) for at in self._starts)
        if not batches and now - heard_at > self._stale_s:
            log.warning("%s: no answer for %.1f s: consumer replaced", self.name, self._stale_s)
            await self._drop()
        return [record for batch in batches.values() for raw in batch if (record := self._record(raw)) is not None]

    def position(self, topic: Topic, partition: int) -> int:
        """The offset of the next record."""
        return self._positions[self._at(topic, partition)]

    def positions(self, topic: Topic) -> dict[int, int]:
        """The topic's partitions -> the offset of the next record."""
        name = self._settings.topic_name(topic)
        return {at.partition: offset for at, offset in self._positions.items() if at.topic == name}

    def last_fetch_age(self, now: float) -> float:
        """Seconds since the worst of the partitions was last fetched with success, found empty or not.

        `now`: time.monotonic(). Infinite before the first. It also grows while nobody polls.
        """
        if self._consumer is not None:
            self._look(self._consumer, now)
        if len(self._fetched_at) < len(self._starts):
            return float("inf")
        return max(0.0, now - min(self._fetched_at.values()))

    async def end_offsets(self, topic: Topic, timeout_s: float = 5.0) -> dict[int, int]:
        """The assigned partitions -> the offset that their next record will get. Raises BusUnavailable."""
        name = self._settings.topic_name(topic)
        try:
            async with asyncio.timeout(timeout_s):
                if self._consumer is None and not await self._open():
                    raise BusUnavailable(f"{self.name}: Kafka is away")
                assert self._consumer is not None
                ends = await self._consumer.end_offsets([at for at in self._starts if at.topic == name])
        except (KafkaError, TimeoutError) as error:
            raise BusUnavailable(f"{self.name}: no end offsets of {topic.name}: {error!r}") from error
        return {at.partition: offset for at, offset in ends.items()}

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """The next record read will be at `offset`, or the first one behind it."""
        at = self._at(topic, partition)
        self._positions[at] = offset
        if self._consumer is not None:
            self._consumer.seek(at, offset)

    async def seek_to_end(self, topic: Topic, partition: int) -> int:
        """Skips what is there; the new position. Raises BusUnavailable."""
        end = (await self.end_offsets(topic))[partition]
        self.seek(topic, partition, end)
        return end

    def _at(self, topic: Topic, partition: int) -> TopicPartition:
        return TopicPartition(self._settings.topic_name(topic), partition)

    def _record(self, raw: Any) -> Record | None:
        topic = self._topics[raw.topic]
        try:
            value = None if raw.value is None else decode(topic, raw.value)
            key = None if raw.key is None else raw.key.decode()
        except (UndecodableRecord, UnicodeDecodeError) as error:
            self.undecodable[topic.name] += 1
            if self.undecodable[topic.name] == 1:
                log.error("%s: %s/%d@%d skipped: %s", self.name, topic.name, raw.partition, raw.offset, error)
            return None
        return Record(topic, raw.partition, raw.offset, key, value, raw.timestamp, raw.headers)

    def _look(self, consumer: AIOKafkaConsumer, now: float) -> None:
        """Notes which partitions have been fetched since the last look."""
        unix_ms = time.time() * 1000
        for at in self._starts:
            stamp = consumer.last_poll_timestamp(at)
            if stamp is not None and stamp != self._seen.get(at):
                self._seen[at] = stamp
                # The stamp is of the wall clock, which may jump: it places the fetch only since the last look.
                age_s = min(max(0.0, (unix_ms - stamp) / 1000), now - self._seen_at)
                self._fetched_at[at] = now - age_s
        self._seen_at = now

    async def _open(self) -> bool:
        """One attempt to connect, at most CONNECT_LIMIT_S. Resolves start positions the first time."""
        async with self._opening:
            return self._consumer is not None or await self._connect()

    async def _connect(self) -> bool:
        consumer = AIOKafkaConsumer(
            client_id=f"lorafleet-{self.name}",
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=self._fetch_wait_ms,
            **self._settings.client_kwargs(),
        )
        opened = False
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await consumer.start()
                if not self._positions:
                    self._positions = await self._resolve(consumer)
            consumer.assign(list(self._starts))  # and sought in the same breath, or it asks for committed offsets
            for at, offset in self._positions.items():
                consumer.seek(at, offset)
            opened = True
        except (KafkaError, OSError, TimeoutError) as error:
            if not self._told:
                log.warning("%s: no consumer yet: %r", self.name, error)
                self._told = True
            return False
        finally:
            if not opened:
                await close_consumer(consumer)
        self._consumer, self._opened_at, self._seen_at = consumer, time.monotonic(), time.monotonic()
        self._seen.clear()
        self._backoff_s, self._told = BACKOFF_S[0], False
        return True

    async def _resolve(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, int]:
        starts = [at for at, start in self._starts.items() if start == "start"]
        ends = [at for at, start in self._starts.items() if start == "end"]
        positions: dict[TopicPartition, int] = {at: n for at, n in self._starts.items() if isinstance(n, int)}
        if starts:
            positions |= await consumer.beginning_offsets(starts)
        if ends:
            positions |= await consumer.end_offsets(ends)
        return positions

    async def _raise_lost(self, consumer: AIOKafkaConsumer, at: TopicPartition, position: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                earliest, end = await consumer.beginning_offsets([at]), await consumer.end_offsets([at])
        except (KafkaError, TimeoutError):
            await self._drop()  # away just now: the next consumer will meet the same again
            return
        raise OffsetLost(self._topics[at.topic].name, at.partition, position, earliest[at], end[at])

    async def _back_off(self, most_s: float) -> None:
        await asyncio.sleep(min(self._backoff_s, most_s))
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])

    async def _drop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await close_consumer(consumer)
