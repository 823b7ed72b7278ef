"""A proxy before a real store that cuts connections in the middle of an answer."""

import asyncio
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit


class Between:
    """`cut_after`: of the first answers, the bytes after which each is cut. `asked`: all header lines of requests."""

    def __init__(self, endpoint: str, cut_after: Sequence[int]) -> None:
        address = urlsplit(endpoint)
        self._host, self._port = address.hostname or "", address.port or 0
        self._cuts = list(cut_after)
        self.asked: list[str] = []
        self.answers: list[int] = []  # bytes of each
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection. The Host header stays as it was signed: it is not checked against a port."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked += head.decode().split("\r\n")
        store_reader, store_writer = await asyncio.open_connection(self._host, self._port)
        store_writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        left = self._cuts.pop(0) if self._cuts else None
        sent = 0
        while data := await store_reader.read(4096):
            if left is not None and sent + len(data) > left:
                data = data[: left - sent]
            writer.write(data)
            await writer.drain()
            sent += len(data)
            if left is not None and sent >= left:
                break
        self.answers.append(sent)
        writer.close()
        store_writer.close()
