"""The protocol: one topic's records into ClickHouse, each exactly once, however often this process is killed.

Relies on: one sink per topic at a time (a second one is noticed, and ends); the log giving the same records at the same
offsets again; ClickHouse inserting a part whole or not at all, and no second time under the same token.

  1. gather: read for up to FLUSH_S or FLUSH_ROWS. The ranges read are the block.
  2. write the block's bounds into sink_progress. From here on these very ranges go in together.
  3. insert the rows of each table, under the block's token.

A crash before 2 leaves nothing; the ranges are cut anew. A crash after it: at its start the sink reads the last block's
ranges again and does 3 once more; what had been inserted is dropped by its token. One block spans all partitions of its
topic, so a second of traffic is three inserts, not three for every partition.
"""

import asyncio
import logging
import time

from schemas.topics import Topic
from streams.bus.errors import BusUnavailable, OffsetLost
from streams.bus.reader import Reader, Record, Start
from streams.bus.settings import KafkaSettings
from streams.sink.block import Block, Bounds
from streams.sink.progress import read_progress, write_progress
from streams.sink.rows import columns, day_of
from streams.sink.warehouse import Warehouse

log = logging.getLogger(__name__)

FLUSH_S = 1.0
FLUSH_ROWS = 5_000
POLL_S = 0.25
POLL_ROWS = 1_000
FETCH_WAIT_MS = 500


class SecondSink(Exception):
    """Another sink writes the same topic: together they would insert records twice."""


class TopicSink:
    def __init__(self, settings: KafkaSettings, warehouse: Warehouse, topic: Topic) -> None:
        self._settings = settings
        self._warehouse = warehouse
        self._topic = topic
        self._written_ms = 0  # of the newest block
        self._known_ms: dict[int, int] = {}  # partition -> records up to this time are in ClickHouse, or lost
        self._done: dict[int, int] = {}  # partition -> next offset: all before it is in ClickHouse, or lost
        self._moved = asyncio.Event()

    async def recover(self) -> dict[int, Start]:
        """Completes the last block. Gives where to go on."""
        progress = await read_progress(self._warehouse, self._topic)
        self._written_ms = progress.written_ms
        if progress.last is not None:
            await self._replay(progress.last)
        starts: dict[int, Start] = dict.fromkeys(range(self._settings.partitions(self._topic)), "start")
        return starts | progress.next

    async def follow(self, starts: dict[int, Start]) -> None:
        """Never ends. Raises SecondSink."""
        async with self._reader(starts) as reader:
            while True:
                if block := await self._gather(reader):
                    await self._commit(block)
                self._done = reader.positions(self._topic)
                self._moved.set()

    async def reached(self, ends: dict[int, int]) -> None:
        """Waits until everything before `ends`, partition -> offset, is in ClickHouse."""
        while any(self._done.get(partition, -1) < end for partition, end in ends.items()):
            self._moved.clear()
            await self._moved.wait()

    async def check_alone(self) -> None:
        """Raises SecondSink."""
        found = await read_progress(self._warehouse, self._topic)
        if found.written_ms > self._written_ms:
            raise SecondSink(f"another sink writes {self._topic.name}: this one ends; let only one run")

    def _reader(self, starts: dict[int, Start]) -> Reader:
        return Reader(
            self._settings,
            {self._topic: starts},
            f"sink {self._topic.name}",
            fetch_wait_ms=FETCH_WAIT_MS,
            max_records=POLL_ROWS,
        )

    async def _gather(self, reader: Reader) -> Block | None:
        began = time.monotonic()
        firsts = reader.positions(self._topic)
        records: list[Record] = []
        while len(records) < FLUSH_ROWS and (left_s := began + FLUSH_S - time.monotonic()) > 0:
            try:
                polled = await reader.poll(min(POLL_S, left_s))
            except OffsetLost as lost:
                if reader.positions(self._topic) != firsts:
                    break  # first what was read before; the loss shows again
                self._go_on(reader, lost)
                firsts = reader.positions(self._topic)
                continue
            records += [
                r for r in polled if r.value is not None and r.timestamp_ms > self._known_ms.get(r.partition, -1)
            ]
        bounds = [
            Bounds(partition, firsts[partition], after)
            for partition, after in reader.positions(self._topic).items()
            if after > firsts[partition]
        ]
        if not bounds:
            return None
        now_ms = time.time_ns() // 1_000_000
        day = day_of(records[0].timestamp_ms if records else now_ms)
        return _filled(Block(self._topic, max(now_ms, self._written_ms + 1), day, bounds), records)

    async def _commit(self, block: Block) -> None:
        await self.check_alone()
        await write_progress(self._warehouse, block)
        self._written_ms = block.written_ms
        await self._insert(block)

    async def _insert(self, block: Block) -> None:
        for table, lines in sorted(block.lines.items()):
            await self._warehouse.insert(table, columns(table), lines, block.token())

    async def _replay(self, block: Block) -> None:
        """Reads a block's ranges again and inserts what they hold."""
        records: list[Record] = []
        untils = {at.partition: at.next for at in block.bounds}
        async with self._reader({at.partition: at.first for at in block.bounds}) as reader:
            ends = await self._ends(reader)
            untils = {partition: min(until, ends[partition]) for partition, until in untils.items()}
            while any(reader.position(self._topic, partition) < until for partition, until in untils.items()):
                try:
                    records += await reader.poll(POLL_S)
                except OffsetLost as lost:
                    if lost.position > lost.end:
                        del untils[lost.partition]  # shown again by the reader that follows
                    self._go_on(reader, lost)
        within = [r for r in records if r.value is not None and r.offset < untils.get(r.partition, 0)]
        await self._insert(_filled(block, within))
        log.info("%s: the last block was sent again: %s", self._topic.name, block.token())

    async def _ends(self, reader: Reader) -> dict[int, int]:
        while True:
            try:
                return await reader.end_offsets(self._topic)
            except BusUnavailable:
                await asyncio.sleep(POLL_S)

    def _go_on(self, reader: Reader, lost: OffsetLost) -> None:
        """From the earliest record that is left, and never over what ClickHouse has already."""
        if lost.position < lost.earliest:
            log.error("%s: %d records expired before they were read", lost, lost.earliest - lost.position)
        else:
            # Made anew, or cut at its end: what is older than the newest block was read in its former life.
            log.error("%s: the topic is another one than before: what is new in it is read", lost)
            self._known_ms[lost.partition] = self._written_ms
        reader.seek(self._topic, lost.partition, lost.earliest)


def _filled(block: Block, records: list[Record]) -> Block:
    for record in records:
        block.add(record.value, record.partition, record.offset)
    return block
