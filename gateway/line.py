"""The line between one open request and its client: tokens that came and were not taken yet, and the last word.

It never holds more than the request's max_tokens, and one reader takes all there is at once.
"""

import asyncio
from dataclasses import dataclass

from gateway.flight import End, Flight


@dataclass(frozen=True)
class News:
    """New tokens, and the end if it has come; it comes after every token."""

    ids: list[int]
    end: End | None


class Line:
    """`flight` is the request behind it. Times are monotonic seconds; None until then."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.end: End | None = None
        self._ids: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, ids: list[int], now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self._ids += ids
        self._wake()

    def finish(self, end: End) -> None:
        self.end = end
        self._wake()

    async def news(self, timeout_s: float | None = None) -> News | None:
        """What is new, as soon as there is something; None if nothing came within `timeout_s`."""
        if not self._ids and self.end is None:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            if not self._ids and self.end is None:
                return None
        ids, self._ids = self._ids, []
        return News(ids, self.end)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
