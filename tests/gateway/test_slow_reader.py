"""A client that stops reading just before an answer's last bytes."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway import slow_reader, sse
from gateway.answer import Answer
from gateway.base_model import BaseModel
from gateway.flight import Ask, End, Flight
from gateway.line import Line, Lines
from gateway.metrics import Metrics
from gateway.middleware import answering
from gateway.openai_api import ChatRequest, Message
from gateway.style import Chat
from schemas.reasons import Outcome
from schemas.requests import Sampling

TOKENS = 8_000  # about 50 KB of text: less than aiohttp writes before it looks whether anybody reads


class Switchboard:
    """Takes note of who is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, line: Line, outcome: Outcome, detail: str = "") -> None:
        self.cancelled.append(detail)


async def test_it_is_cut_off_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_reader, "WRITE_LIMIT_S", 0.3)
    monkeypatch.setattr(slow_reader, "SEND_BUFFER_BYTES", 1)
    base, board, ended = BaseModel.load(model), Switchboard(), asyncio.Event()
    [word] = base.vocabulary.encode(" hello")

    async def post(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.set_write_buffer_limits(high=1 << 12)
        lines = Lines()
        line = lines.add(Flight(Ask("r", "acme", "m", "", "", [1], TOKENS, Sampling(1), [], 0.0, 9.0)))
        line.deliver([word] * TOKENS, [], 1.0)
        line.finish(End("r", Outcome.OK, "length"))
        switchboard: Any = board
        try:
            asked = ChatRequest(model="m", messages=[Message("user", "x")])
            return await sse.stream(Answer("r", switchboard, base, asked, lines, Chat, {}), request)
        finally:
            ended.set()

    app = web.Application(middlewares=[answering(Metrics())])
    app.router.add_post("/", post)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, logger=logging.getLogger(__name__))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, runner.addresses[0])
        await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        try:
            async with asyncio.timeout(5):
                await ended.wait()
        finally:
            client.close()
            await runner.cleanup()
    assert board.cancelled == ["the client reads too slowly"]
