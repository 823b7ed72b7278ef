"""What the workers say of the canary's own attempts: in which slot, and which filling of it, each ran.

Owns a reader of the canary's partition of `finished`, from its end at the start on. A crash forgets what it has heard.
"""

import asyncio
import contextlib
from collections import OrderedDict
from typing import Self

from replay.probe.golden import CUSTOMER
from schemas.stats import AttemptFinished
from schemas.topics import FINISHED
from streams.bus.errors import OffsetLost
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import partition_of

KEPT = 1_000
LIMIT_S = 3.0


class Attempts:
    """`async with Attempts(settings) as attempts`."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._partition = partition_of(CUSTOMER.encode(), kafka.partitions(FINISHED))
        self._reader = Reader(kafka, {FINISHED: {self._partition: "end"}}, "probe")
        self._rows: OrderedDict[str, AttemptFinished] = OrderedDict()
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._reader.start()
        self._reading = asyncio.create_task(self._read(), name="attempts")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._reader.stop()

    async def row(self, request_id: str) -> AttemptFinished | None:
        """Of a request that was answered; None if nothing was heard of it within LIMIT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while request_id not in self._rows:
                    self._more.clear()
                    await self._more.wait()
        return self._rows.get(request_id)

    async def _read(self) -> None:
        while True:
            try:
                records = await self._reader.poll()
            except OffsetLost as lost:
                self._reader.seek(FINISHED, lost.partition, lost.end)
                continue
            for record in records:
                if isinstance(record.value, AttemptFinished) and record.value.customer == CUSTOMER:
                    self._rows[record.value.request_id] = record.value
                    self._more.set()
            while len(self._rows) > KEPT:
                self._rows.popitem(last=False)
