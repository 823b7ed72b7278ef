"""Topic `tokens`: this gateway's partition, from the claim's start offset on, to the flights.

Owns the reader and its position. Ordering relied on: the partition's. If the log no longer has the position, whatever
was open may have missed tokens: reading goes on at the end, and every open attempt begins anew. A crash: the place's
next holder starts at its own, later offset.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

from schemas.tokens import TokenBatch
from schemas.topics import TOKENS
from streams.bus.errors import OffsetLost
from streams.bus.reader import Headers, Reader
from streams.bus.settings import KafkaSettings

log = logging.getLogger(__name__)

FETCH_WAIT_MS = 250  # of an idle fetch; one partition, so nothing new ever waits behind another's
MAX_RECORDS = 200  # between two looks at other work of the event loop


class Replies:
    """`heard` takes each record and its headers, `gap` is told when some are gone."""

    def __init__(
        self, kafka: KafkaSettings, place: int, heard: Callable[[TokenBatch, Headers], None], gap: Callable[[], None]
    ) -> None:
        self._place, self._heard, self._gap = place, heard, gap
        self._reader = Reader(
            kafka, {TOKENS: {place: "end"}}, "replies", fetch_wait_ms=FETCH_WAIT_MS, max_records=MAX_RECORDS
        )

    async def start(self) -> None:
        """Waits until Kafka answers."""
        await self._reader.start()

    async def stop(self) -> None:
        await self._reader.stop()

    async def end(self) -> int:
        """Skips to the partition's end: where a new claim starts. Raises TimeoutError, KafkaError."""
        return await self._reader.seek_to_end(TOKENS, self._place)

    @property
    def undecodable(self) -> int:
        return self._reader.undecodable.total()

    def age(self, now: float) -> float:
        """Seconds since Kafka last answered. `now`: time.monotonic()."""
        return self._reader.last_fetch_age(now)

    async def run(self) -> NoReturn:
        while True:
            try:
                records = await self._reader.poll()
            except OffsetLost as lost:
                log.error("%s: reading on at its end", lost)
                self._reader.seek(TOKENS, self._place, lost.end)
                self._gap()
                continue
            for record in records:
                if record.value is not None:
                    self._heard(record.value, record.headers)
