"""The cold records: `finished` and `cache-events`, for ClickHouse.

Owns what is not acknowledged yet. Rows of attempts wait LATER_S: the numbers can wait, the tokens of the same step
cannot, and those take some turns of the loop to reach the socket. A record that was surely not written (a long outage)
is written again, behind later ones: rows carry their own time. One of unknown fate is not, for a row twice is worse
than a row less; it is counted. A crash loses what was not acknowledged.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from schemas.stats import AttemptFinished, CacheEvent
from schemas.topics import CACHE_EVENTS, FINISHED, Topic
from streams.bus.errors import BusUnavailable, NotWritten
from streams.bus.writer import Writer, Written

log = logging.getLogger(__name__)

LATER_S = 0.02
RETRY_S = 1.0
MOST_WAITING = 20_000
_JSON = msgspec.json.Encoder()


class Ledger:
    """`writer` is the worker's cold one, never that of tokens."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._ended: list[AttemptFinished] = []
        self._waiting = 0
        self.lost = 0

    def attempt(self, row: AttemptFinished) -> None:
        """Stamps the row; a little later writes and logs it: one line per attempt, with whose it was and where."""
        if not self._ended:
            asyncio.get_running_loop().call_later(LATER_S, self._write_ended)
        self._ended.append(msgspec.structs.replace(row, at_unix_ms=_unix_ms()))

    def cache(self, event: CacheEvent) -> None:
        """Stamps and writes the event."""
        event = msgspec.structs.replace(event, at_unix_ms=_unix_ms())
        log.info("cache %s", _JSON.encode(event).decode())
        self._write(CACHE_EVENTS, str(event.replica), event)

    async def drained(self, limit_s: float) -> bool:
        """Waits until everything is acknowledged; whether that is so."""
        end = time.monotonic() + limit_s
        while self._ended or self._waiting:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.01)
        return True

    def _write_ended(self) -> None:
        ended, self._ended = self._ended, []
        for row in ended:
            log.info("attempt %s", _JSON.encode(row).decode())
            self._write(FINISHED, row.customer, row)

    def _write(self, topic: Topic, key: str, value: msgspec.Struct) -> None:
        if self._waiting >= MOST_WAITING:
            self._lose(topic, f"{self._waiting} records wait already")
            return
        self._waiting += 1
        self._try(topic, key, value)

    def _try(self, topic: Topic, key: str, value: msgspec.Struct) -> None:
        try:
            future = self._writer.send_nowait(topic, value, key=key)
        except BusUnavailable:
            self._later(lambda: self._try(topic, key, value))
            return

        def acknowledged(future: asyncio.Future[Written]) -> None:
            error = None if future.cancelled() else future.exception()
            if isinstance(error, NotWritten):
                self._later(lambda: self._try(topic, key, value))
                return
            self._waiting -= 1
            if error is not None:
                self._lose(topic, str(error))

        future.add_done_callback(acknowledged)

    def _later(self, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(RETRY_S, what)

    def _lose(self, topic: Topic, why: str) -> None:
        self.lost += 1
        log.error("%s: a record is lost: %s", topic.name, why)


def _unix_ms() -> int:
    return int(time.time() * 1000)
