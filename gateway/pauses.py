"""Notices that this process was paused or cut off; keeps it silent until it is known that its place is still its own.

Whoever is silent for long is replaced, and what it had open is closed for it: a row that it wrote afterwards would be a
request's second. Ordering relied on: `may_write` is asked just before a record leaves (streams/bus/writer.py), so that
one that waited in a queue stays there, whichever timer of a resumed process runs first; and after a cut, in which
nothing leaves, it has said no for long. A batch on its way to the broker by then still arrives. A crash loses nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from streams.bus.errors import BusUnavailable

log = logging.getLogger(__name__)

LOOK_S = 0.05
PAUSED_S = 3.0  # shorter than the silence after which others may claim the place


class Pauses:
    """`still_mine` asks the broker; it raises ReplacedError or BusUnavailable. `deaf_s`: seconds since the broker was
    heard, 0 before there is a place to lose. `late` is told how late each look is.
    """

    def __init__(
        self, still_mine: Callable[[], Awaitable[None]], deaf_s: Callable[[], float], late: Callable[[float], None]
    ) -> None:
        self._still_mine, self._deaf_s, self._late = still_mine, deaf_s, late
        self._looked_at: float | None = None  # while `run` runs
        self._in_doubt = False

    def may_write(self) -> bool:
        if self._in_doubt:
            return False
        return self._looked_at is None or time.monotonic() - self._looked_at <= PAUSED_S

    async def run(self) -> NoReturn:
        """For ever. Raises ReplacedError."""
        try:
            while True:
                self._looked_at = began = time.monotonic()
                await asyncio.sleep(LOOK_S)
                late_s = time.monotonic() - began - LOOK_S
                self._late(max(0.0, late_s))
                if late_s > PAUSED_S - LOOK_S:
                    log.warning("this process was paused for %.1f s", late_s)
                    await self._make_sure()
                elif self._deaf_s() > PAUSED_S:
                    log.warning("the broker has not been heard for %.1f s", self._deaf_s())
                    await self._make_sure()
        finally:
            self._looked_at = None

    async def _make_sure(self) -> None:
        self._in_doubt = True
        while True:
            while self._deaf_s() > PAUSED_S:  # noqa: ASYNC110 - asking now would only wait for its own time limit
                await asyncio.sleep(LOOK_S)
            asked_at = time.monotonic()
            try:
                await self._still_mine()
            except BusUnavailable as error:
                log.warning("not known yet whether this gateway still holds its place: %s", error)
                await asyncio.sleep(LOOK_S)
                continue
            if time.monotonic() - asked_at <= PAUSED_S:  # else the answer is as old as another pause
                break
        self._in_doubt = False
