"""Topic `finished`: exactly one RequestFinished for every request that was accepted.

Owns the rows that the broker does not hold yet, up to MAX_ROWS: they wait through an outage. A row that was surely not
written is written again; one of which nobody can tell is not, since a reader may count it already. A crash loses what
waits, and the reconciler closes those requests as `gateway_lost`. So does it for a gateway that was replaced: one that
was paused or cut off lets no row leave its writer until it is known that it was not (pauses.py).
"""

import asyncio
import logging
from collections import deque
from functools import partial
from typing import NoReturn

from schemas.stats import RequestFinished
from schemas.topics import FINISHED
from streams.bus.errors import NotWritten
from streams.bus.writer import Writer, Written

log = logging.getLogger(__name__)

MAX_ROWS = 100_000
WINDOW = 1_000  # rows handed to the writer and not yet acknowledged
RETRY_S = 0.5


class Finishes:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._rows: deque[RequestFinished] = deque()
        self._on_the_way = 0
        self._moved = asyncio.Event()
        self.written = 0
        self.lost = 0  # no room, or nobody can tell

    @property
    def waiting(self) -> int:
        return len(self._rows) + self._on_the_way

    def note(self, row: RequestFinished) -> None:
        """One accepted request's end."""
        if len(self._rows) >= MAX_ROWS:
            self._lose("too many wait")
            return
        self._rows.append(row)
        self._moved.set()

    async def run(self) -> NoReturn:
        while True:
            self._moved.clear()
            while self._rows and self._on_the_way < WINDOW:
                row = self._rows.popleft()
                try:
                    fate = self._writer.send_nowait(FINISHED, row, key=row.customer)
                except NotWritten:
                    self._rows.appendleft(row)
                    await asyncio.sleep(RETRY_S)
                    continue
                self._on_the_way += 1
                fate.add_done_callback(partial(self._done, row))
            await self._moved.wait()

    async def flush(self, limit_s: float) -> None:
        """Waits, up to `limit_s`, until the broker holds every row; `run` is running."""
        try:
            async with asyncio.timeout(limit_s):
                while self.waiting:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            log.error("%d finished requests were not written", self.waiting)

    def _done(self, row: RequestFinished, fate: asyncio.Future[Written]) -> None:
        self._on_the_way -= 1
        error = None if fate.cancelled() else fate.exception()
        if error is None and not fate.cancelled():
            self.written += 1
        elif isinstance(error, NotWritten):
            self._rows.append(row)
        else:
            self._lose(str(error))
        self._moved.set()

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.error("a finished request goes unreported: %s", why)
