"""Many long streams at once over bare sockets: an open loop that reads of each chunk nothing but the age of its words.

As lean as replay/rawchat.py and for its reason. Arrivals are Poisson, whatever the answers do. The steady
state is there from the start: as many streams as are open on average are opened ahead, each with a part of its tokens
still to come. What is looked at is a window of it.
"""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import cast
from urllib.parse import urlsplit

import msgspec

from replay.stamps import Stamps

CONTENT = re.compile(rb'"content":" ([^"]*)"')
END = b"\r\n0\r\n\r\n"
AHEAD_S = 10.0  # in which the streams that a window begins with are opened, beside those that arrive meanwhile

Body = Callable[[int, int, int], tuple[str, bytes]]  # (number, max_tokens, steps per token) -> key, body


@dataclass(frozen=True)
class Shape:
    """`rate` streams a second of `tokens` each, a token per `step_s`."""

    rate: float
    tokens: int
    step_s: float

    @property
    def open(self) -> int:
        """Streams that are open at once, on average."""
        return round(self.rate * self.tokens * self.step_s)


class Seen(msgspec.Struct):
    """Of one window, in milliseconds: the first tokens' times from their requests, and the later tokens' ages."""

    ttft: list[float] = []
    ages: list[float] = []
    chunks: int = 0
    broken: list[str] = []
    seconds: float = 0.0


class RawStreams:
    """Of one server. Every connection ends with `async with`."""

    def __init__(self, url: str, body: Body, stamps: Stamps) -> None:
        at = urlsplit(url)
        assert at.hostname is not None
        assert at.port is not None
        self._at, self._body, self._stamps = (at.hostname, at.port), body, stamps
        self._open: set[_Stream] = set()
        self.seen: Seen | None = None  # while a window is open

    async def __aenter__(self) -> "RawStreams":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()

    def __len__(self) -> int:
        return len(self._open)

    def cut(self) -> None:
        """Hangs up on every stream."""
        for stream in list(self._open):
            stream.hang_up()
        self._open.clear()

    async def start(self, number: int, tokens: int, pace: int = 1) -> None:
        """Asks for one stream, on a connection of its own."""
        key, body = self._body(number, tokens, pace)
        request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._at[0]}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        stream = _Stream(self, request, tokens)
        self._open.add(stream)
        try:
            await asyncio.get_running_loop().create_connection(lambda: stream, *self._at)
        except OSError as error:
            self.ended(stream, repr(error))

    @asynccontextmanager
    async def steady(self, shape: Shape, warm_s: float, seed: int = 0) -> AsyncIterator[None]:
        """Arrivals of this shape go on during the body, and have for `warm_s`; then every stream is cut off."""
        loading = asyncio.create_task(self._load(shape, random.Random(seed)), name="arrivals")
        try:
            await asyncio.sleep(AHEAD_S + warm_s)
            yield
        finally:
            loading.cancel()
            self.cut()
            with suppress(asyncio.CancelledError):
                await loading

    async def window(self, seconds: float) -> Seen:
        """What comes in so long. Who still waits for a first token then counts as if it came just now."""
        seen, began = Seen(), time.perf_counter()
        self.seen = seen
        try:
            await asyncio.sleep(seconds)
        finally:
            self.seen = None
        now = time.monotonic()
        seen.ttft += [(now - asked_at) * 1000 for stream in self._open if (asked_at := stream.waits_since(seen))]
        return msgspec.structs.replace(seen, seconds=time.perf_counter() - began)

    async def _load(self, shape: Shape, dice: random.Random) -> None:
        ahead = [(n * AHEAD_S / shape.open, dice.randint(1, shape.tokens)) for n in range(shape.open)]
        # Each with what is left of its tokens by then: opening them takes a while.
        arrivals = [(at, left) for at, all_ in ahead if (left := all_ - int(at / shape.step_s)) > 0]
        began, due, number = time.perf_counter(), 0.0, 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                due += dice.expovariate(shape.rate)
                heappush(arrivals, (due, shape.tokens))
                while arrivals and arrivals[0][0] <= due:
                    at, tokens = heappop(arrivals)
                    await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                    tasks.create_task(self.start(number, tokens), name=f"stream {number}")
                    number += 1

    def ended(self, stream: "_Stream", wrong: str) -> None:
        """`wrong`: why it was no whole stream; empty for one that was."""
        self._open.discard(stream)
        if wrong and self.seen is not None:
            self.seen.broken.append(wrong)

    def came(self, text: bytes, now: float) -> None:
        if self.seen is not None:
            self.seen.chunks += 1
            self.seen.ages += self._stamps.ages_ms(text, now)


class _Stream(asyncio.Protocol):
    """One request and its answer's bytes."""

    def __init__(self, streams: RawStreams, request: bytes, tokens: int) -> None:
        self._streams, self._request, self._missing = streams, request, tokens
        self._transport: asyncio.Transport | None = None
        self._rest, self._answered, self._first, self._over = b"", False, False, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        self._asked_at, self._in_window = time.monotonic(), self._streams.seen
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not data.endswith(b"\r\n"):  # in the middle of a chunk
            self._rest = data
            return
        if not self._answered and not data.startswith(b"HTTP/1.1 200 "):
            self._end(data[:300].decode(errors="replace"))
            return
        self._answered = True
        for text in CONTENT.findall(data):
            self._missing -= text.count(b" ") + 1
            if self._first:
                self._streams.came(text, now)
            else:
                self._first = True
                if (seen := self._in_window) is not None and seen is self._streams.seen:
                    seen.ttft.append((now - self._asked_at) * 1000)
        if data.endswith(END):
            self._end("" if not self._missing else f"{self._missing} tokens are missing")

    def connection_lost(self, _: Exception | None) -> None:
        self._end("it broke off")

    def waits_since(self, seen: Seen) -> float | None:
        """When it was asked for, if that was in this window and nothing came."""
        return self._asked_at if self._transport is not None and not self._first and self._in_window is seen else None

    def hang_up(self) -> None:
        self._over = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, wrong: str) -> None:
        if not self._over:
            self._over = True
            self._streams.ended(self, wrong)
            if self._transport is not None:
                self._transport.close()
