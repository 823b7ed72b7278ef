"""What happened to an adapter or an alias: topic `adapter-events`, read when somebody asks.

Owns nothing between calls: history is asked for rarely, and a table of it would lie in every gateway's memory. A
customer's events are in one partition; it is read from its start up to the end seen at the call, so that an event whose
command was answered before is in it. Ordering: the log's, which is that of the customer's commands. An event that a
crash of the registry wrote twice is told once.
"""

import asyncio

from gateway.errors import ApiError
from schemas.adapters import AdapterEvent
from schemas.topics import ADAPTER_EVENTS
from streams.bus.errors import BusUnavailable, OffsetLost
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import partition_of

READ_LIMIT_S = 20.0
NEWEST = 200  # events told of one name
AT_ONCE = 2  # a consumer each


class History:
    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def of(self, customer: str, name: str) -> list[AdapterEvent]:
        """The newest events about an adapter or an alias of the customer, oldest first. Raises ApiError (503)."""
        try:
            async with asyncio.timeout(READ_LIMIT_S), self._turns:
                return await self._read(customer, name)
        except (TimeoutError, BusUnavailable) as error:
            raise ApiError("broker", f"the events could not be read: {error}") from None

    async def _read(self, customer: str, name: str) -> list[AdapterEvent]:
        partition = partition_of(customer.encode(), self._kafka.partitions(ADAPTER_EVENTS))
        found: dict[tuple[int, int, str], AdapterEvent] = {}
        async with Reader(self._kafka, {ADAPTER_EVENTS: {partition: "start"}}, "history", fetch_wait_ms=20) as reader:
            end = (await reader.end_offsets(ADAPTER_EVENTS))[partition]
            while reader.position(ADAPTER_EVENTS, partition) < end:
                try:
                    records = await reader.poll()
                except OffsetLost as lost:  # retention dropped what was about to be read
                    reader.seek(ADAPTER_EVENTS, partition, lost.earliest)
                    continue
                for record in records:
                    event: AdapterEvent | None = record.value
                    if event is None or event.customer != customer:
                        continue
                    if name in (event.adapter_id, event.alias, event.previous_adapter_id):
                        found.setdefault((event.command_partition, event.command_offset, event.kind), event)
        return list(found.values())[-NEWEST:]
