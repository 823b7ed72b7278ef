"""Chats over bare sockets: what a load generator costs on a machine that it shares with what it measures.

A full HTTP client spends as much time on a request as the gateway does. This one writes a prepared request on a kept
connection, reads the answer's bytes, and parses no more of them than it asks about. An answer that is not a whole
stream with a token in it raises ValueError.
"""

import asyncio
import time
from urllib.parse import urlsplit

CONTENT, EMPTY, END = b'"content":"', b'"content":""', b"0\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RawChats:
    """One request body, sent as often as it is called. Closes its connections at the end of `async with`."""

    def __init__(self, url: str, key: str, body: bytes) -> None:
        at = urlsplit(url)
        assert at.hostname is not None
        assert at.port is not None
        self._host, self._port = at.hostname, at.port
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._idle: list[Connection] = []
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "RawChats":
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._open:
            writer.close()

    async def __call__(self, _: int) -> float:
        """One chat; milliseconds from the first byte out to the first content in."""
        reader, writer = connection = await self._connection()
        started = time.perf_counter()
        writer.write(self._request)
        answer, first = b"", 0.0
        while not answer.endswith(END):
            news = await reader.read(65536)
            if not news:
                raise ValueError(f"the answer broke off: {answer[:200]!r}")
            answer += news
            if not first and answer.count(CONTENT) > answer.count(EMPTY):
                first = time.perf_counter()
        if not first or not answer.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"no token came: {answer[:200]!r}")
        self._idle.append(connection)
        return (first - started) * 1000

    async def _connection(self) -> Connection:
        """The last one that is idle and that the server has not closed meanwhile, or a new one."""
        while self._idle:
            reader, writer = connection = self._idle.pop()
            if not reader.at_eof():
                return connection
            writer.close()
            self._open.discard(writer)
        connection = await asyncio.open_connection(self._host, self._port)
        self._open.add(connection[1])
        return connection
