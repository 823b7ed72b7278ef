"""`finished` -> `adapter-stats`: how much each adapter was asked for in the last minute, as replicas want to know it.

Owns the rows of `adapter-stats`. They are a hint for who pulls what first, not an account: that is ClickHouse's. Each
control process counts all of it by itself, from its own start on and whole windows only: two write the same rows, and a
crash costs a window. Ordering relied on: none. An adapter that nobody asks for any more gets one row that says so.
"""

import logging
import time
from collections.abc import Callable
from typing import NoReturn

from schemas.placement import AdapterStats
from schemas.reasons import Tier
from schemas.stats import RequestFinished
from schemas.topics import ADAPTER_STATS, FINISHED
from streams.bus.errors import BusUnavailable, OffsetLost
from streams.bus.reader import Reader, Start
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

log = logging.getLogger(__name__)

WINDOW_S = 60
POLL_S = 1.0


class Window:
    """Counts by adapter, from `start_unix_ms` on. Pure."""

    def __init__(self, start_unix_ms: int) -> None:
        self.start_unix_ms = start_unix_ms
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._hits: dict[str, int] = {}

    def add(self, row: RequestFinished) -> None:
        if not row.adapter:
            return
        for counts, count in (
            (self._requests, 1),
            (self._tokens, row.output_tokens),
            (self._hits, int(row.tier is Tier.GPU)),
        ):
            counts[row.adapter] = counts.get(row.adapter, 0) + count

    def stats(self, seconds: float, before: "Window | None") -> list[AdapterStats]:
        """Of every adapter that was asked for in it, or in the window `before`."""
        names = dict.fromkeys([*self._requests, *(before._requests if before is not None else ())])
        return [
            AdapterStats(
                adapter_id=name,
                window_start_unix_ms=self.start_unix_ms,
                requests=(requests := self._requests.get(name, 0)),
                tokens_per_s=self._tokens.get(name, 0) / seconds,
                gpu_hit_rate=self._hits.get(name, 0) / requests if requests else 0.0,
            )
            for name in names
        ]


class Demand:
    """`also`: is told of each request, too."""

    def __init__(
        self,
        settings: KafkaSettings,
        writer: Writer,
        also: Callable[[RequestFinished], None],
        window_s: float = WINDOW_S,
    ) -> None:
        starts: dict[int, Start] = dict.fromkeys(range(settings.partitions(FINISHED)), "end")
        self._reader = Reader(settings, {FINISHED: starts}, "demand", fetch_wait_ms=500)
        self._writer, self._also, self._window_s = writer, also, window_s

    async def run(self) -> NoReturn:
        """For ever."""
        async with self._reader:
            before: Window | None = None
            window, ends = Window(time.time_ns() // 1_000_000), time.monotonic() + self._window_s
            while True:
                try:
                    for record in await self._reader.poll(min(POLL_S, max(0.0, ends - time.monotonic()))):
                        if isinstance(record.value, RequestFinished):
                            window.add(record.value)
                            self._also(record.value)
                except OffsetLost as lost:
                    log.warning("requests were not counted: %s", lost)
                    self._reader.seek(FINISHED, lost.partition, lost.end)
                if time.monotonic() < ends:
                    continue
                await self._tell(window.stats(self._window_s, before))
                before, window = window, Window(time.time_ns() // 1_000_000)
                ends = max(ends + self._window_s, time.monotonic())

    async def _tell(self, stats: list[AdapterStats]) -> None:
        try:
            for row in stats:
                await self._writer.send(ADAPTER_STATS, row, key=row.adapter_id)
        except BusUnavailable as error:
            log.warning("a window is not told: %s", error)
