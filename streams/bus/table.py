"""Compacted topics as dicts: replayed from their start, then followed.

A Table holds the newest value of each key; a TableReader feeds several tables through one consumer. Hot and cold topics
go into different ones. Ordering: a partition's, so a key's; none across partitions. A record is `live` if it was
written after the reader's start: a replayed one says what was, not what is. Tombstones remove.
While Kafka is away the tables keep serving what they have, and `status` says degraded. If the log no longer has a
partition's position (the topic was made anew), its rows are dropped and replayed. A crash loses nothing: it is all in
the topic.
"""

import asyncio
import logging
import time
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from schemas.topics import Topic
from streams.bus.closing import ended
from streams.bus.errors import BusUnavailable, OffsetLost
from streams.bus.reader import Reader, Record, Start
from streams.bus.settings import KafkaSettings

log = logging.getLogger(__name__)

V = TypeVar("V")
POLL_S = 0.1
DEGRADED_S = 3.0


class TableStatus(StrEnum):
    LOADING = "loading"
    CAUGHT_UP = "caught_up"
    DEGRADED = "degraded"  # complete once, but nothing heard from Kafka for DEGRADED_S


@dataclass(frozen=True, slots=True)
class Change(Generic[V]):
    """One record of a table, already applied. `value` None: the key is gone."""

    topic: Topic
    key: str
    value: V | None
    previous: V | None
    partition: int
    offset: int
    timestamp_ms: int
    live: bool


class Table(Generic[V]):
    """The newest value of each key. `on_change` is called for every record, in order, and must not block."""

    def __init__(self, topic: Topic, on_change: Callable[[Change[V]], None] | None = None) -> None:
        if not topic.compacted:
            raise ValueError(f"{topic.name} is not compacted, so no table")
        self.topic = topic
        self._rows: dict[str, V] = {}
        self._partitions: dict[str, int] = {}  # where each key lives
        self._on_change = on_change

    def get(self, key: str) -> V | None:
        return self._rows.get(key)

    def items(self) -> ItemsView[str, V]:
        return self._rows.items()

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def _apply(self, record: Record, live: bool) -> None:
        if record.key is None:
            log.error("%s/%d@%d has no key: skipped", self.topic.name, record.partition, record.offset)
            return
        previous = self._rows.pop(record.key, None)
        if record.value is not None:
            self._rows[record.key] = record.value
            self._partitions[record.key] = record.partition
        if self._on_change is not None:
            self._on_change(
                Change(
                    self.topic,
                    record.key,
                    record.value,
                    previous,
                    record.partition,
                    record.offset,
                    record.timestamp_ms,
                    live,
                )
            )

    def _clear(self, partition: int) -> None:
        """Forgets a partition's rows."""
        for key, previous in list(self._rows.items()):
            if self._partitions[key] != partition:
                continue
            del self._rows[key]
            if self._on_change is not None:
                self._on_change(Change(self.topic, key, None, previous, partition, -1, 0, False))


class TableReader:
    """Feeds tables: `async with TableReader(settings, [adapters, aliases], "gateway tables") as reader`.

    Starts cleanly while Kafka is away. An exception of `on_change` ends the reader; `failed` then completes with it.
    """

    def __init__(
        self, settings: KafkaSettings, tables: Sequence[Table[Any]], name: str, *, fetch_wait_ms: int = 100
    ) -> None:
        self.name = name
        self._tables = {table.topic: table for table in tables}
        starts: dict[Topic, dict[int, Start]] = {
            topic: dict.fromkeys(range(settings.partitions(topic)), "start") for topic in self._tables
        }
        self._reader = Reader(settings, starts, name, fetch_wait_ms=fetch_wait_ms)
        self._ends: dict[tuple[Topic, int], int] = {}  # end offsets seen at start
        self._caught_up = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=self.name)

    async def stop(self) -> None:
        """Ends within about 4 s. Raises what ended the reader, if it had failed."""
        task, self._task = self._task, None
        if task is None:
            return
        await ended(task)
        if task.done() and not task.cancelled():
            task.result()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def failed(self) -> asyncio.Task[None]:
        """The reader's task, to be awaited by whoever must not outlive it."""
        assert self._task is not None, "not started"
        return self._task

    @property
    def status(self) -> TableStatus:
        if not self._caught_up.is_set():
            return TableStatus.LOADING
        return TableStatus.DEGRADED if self.age(time.monotonic()) > DEGRADED_S else TableStatus.CAUGHT_UP

    @property
    def undecodable(self) -> int:
        """Records skipped so far."""
        return self._reader.undecodable.total()

    def age(self, now: float) -> float:
        """Seconds since Kafka last said what is new; see Reader.last_fetch_age. `now`: time.monotonic()."""
        return self._reader.last_fetch_age(now)

    def positions(self, topic: Topic) -> dict[int, int]:
        """Partition -> next offset: all before it is applied. Empty before the first contact."""
        return self._reader.positions(topic)

    async def caught_up(self, timeout_s: float | None = None) -> None:
        """Waits until everything seen at start is applied. Raises BusUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._caught_up.wait()
        except TimeoutError:
            raise BusUnavailable(f"{self.name}: not caught up within {timeout_s:g} s") from None

    async def applied(self, topic: Topic, partition: int, offset: int, timeout_s: float = 5.0) -> None:
        """Waits until the record at `offset` is applied. Raises BusUnavailable."""
        await self._wait({(topic, partition): offset + 1}, timeout_s)

    async def barrier(self, timeout_s: float = 5.0) -> None:
        """Waits until everything written before this call is applied. Raises BusUnavailable."""
        began = time.monotonic()
        await self._wait(await self._end_offsets(timeout_s), timeout_s - (time.monotonic() - began))

    async def _wait(self, ends: dict[tuple[Topic, int], int], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._passed(ends):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise BusUnavailable(f"{self.name}: not applied within {timeout_s:.1f} s") from None

    def _passed(self, ends: dict[tuple[Topic, int], int]) -> bool:
        return all(self._reader.positions(topic).get(partition, -1) >= end for (topic, partition), end in ends.items())

    async def _follow(self) -> None:
        try:
            await self._reader.start()
            await self._see_ends()
            while True:
                try:
                    records = await self._reader.poll(POLL_S)
                except OffsetLost as lost:
                    await self._replay(lost)
                    continue
                for record in records:
                    live = record.offset >= self._ends[record.topic, record.partition]
                    self._tables[record.topic]._apply(record, live)
                if not self._caught_up.is_set() and self._passed(self._ends):
                    self._caught_up.set()
                self._moved.set()
        finally:
            await self._reader.stop()

    async def _see_ends(self) -> None:
        while True:
            try:
                self._ends |= await self._end_offsets()
                return
            except BusUnavailable:
                await asyncio.sleep(POLL_S)

    async def _end_offsets(self, timeout_s: float = 5.0) -> dict[tuple[Topic, int], int]:
        """Of every table, asked at once: they wait for the fetch on its way together, not for one each."""
        ends = await asyncio.gather(*(self._reader.end_offsets(topic, timeout_s) for topic in self._tables))
        return {
            (topic, partition): end
            for topic, partitions in zip(self._tables, ends, strict=True)
            for partition, end in partitions.items()
        }

    async def _replay(self, lost: OffsetLost) -> None:
        log.error("%s: %s: its rows are dropped and replayed", self.name, lost)
        [topic] = [topic for topic in self._tables if topic.name == lost.topic]
        self._caught_up.clear()
        self._tables[topic]._clear(lost.partition)
        self._reader.seek(topic, lost.partition, lost.earliest)
        await self._see_ends()
