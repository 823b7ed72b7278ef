"""The lines between a client and its open outputs: tokens that came and were not taken yet, and the last words.

A line never holds more than its output's max_tokens, and the one reader of all of a client's lines takes all there is
at once.
"""

import asyncio
from dataclasses import dataclass
from math import inf

from gateway.flight import End, Flight
from schemas.tokens import Logprobs


@dataclass(frozen=True)
class News:
    """New tokens, and the end if it has come; it comes after every token. `scores`: one per token, if asked for."""

    line: "Line"
    ids: list[int]
    scores: list[Logprobs]
    end: End | None


class Line:
    """`flight` is the output behind it. Times are monotonic seconds; None until then."""

    def __init__(self, flight: Flight, lines: "Lines") -> None:
        self.flight = flight
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.end: End | None = None
        self._lines = lines
        self._ids: list[int] = []
        self._scores: list[Logprobs] = []
        self._told = False  # the end was taken

    def deliver(self, ids: list[int], scores: list[Logprobs], now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self._ids += ids
        self._scores += scores
        self._lines.wake()

    def finish(self, end: End) -> None:
        self.end = end
        self._lines.wake()

    def take(self) -> News | None:
        """What is new; None if nothing is."""
        if not self._ids and (self.end is None or self._told):
            return None
        news = News(self, self._ids, self._scores, self.end)
        self._ids, self._scores, self._told = [], [], self.end is not None
        return news


class Lines:
    """All the lines of one client's request, in the order of its choices."""

    def __init__(self) -> None:
        self.all: list[Line] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # one for many waits: it comes early, and looks when it is due
        self._due = 0.0

    def add(self, flight: Flight) -> Line:
        self.all.append(line := Line(flight, self))
        return line

    async def news(self, timeout_s: float | None = None) -> list[News]:
        """What is new on any of them, as soon as there is something; nothing if nothing came within `timeout_s`."""
        if news := self._taken():
            return news
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        self._due = inf if timeout_s is None else loop.time() + timeout_s
        if timeout_s is not None and (self._timer is None or self._timer.when() > self._due):
            self._set_timer(loop)
        try:
            await waiter
        finally:
            self._waiter = None
        return self._taken()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._timer = loop.call_at(self._due, self._timed_out, loop)

    def _timed_out(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._due == inf:
            return
        if loop.time() < self._due:
            self._set_timer(loop)
        else:
            self.wake()

    def _taken(self) -> list[News]:
        return [news for line in self.all if (news := line.take()) is not None]
