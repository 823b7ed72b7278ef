"""A client that vanishes, in each phase: nothing of its request is left on the replica, and it is told of once."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from schemas.reasons import Outcome
from schemas.stats import RequestFinished
from schemas.topics import FINISHED
from streams.bus.reader import Reader
from tests.gateway.rig import ACME, Door, Rig, body, until
from tests.stack import Stack

pytestmark = pytest.mark.real


class Raw:
    """A client that speaks HTTP by hand, and can vanish."""

    def __init__(self, door: Door) -> None:
        self._host, self._port = "127.0.0.1", int(door.url.rsplit(":", 1)[1])

    async def send(self, content: bytes, length: int | None = None, buffer: int = 1 << 16) -> asyncio.StreamReader:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
        self.reader, self.writer = await asyncio.open_connection(sock=connection)
        self.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {ACME}\r\nContent-Length: {length or len(content)}\r\n\r\n".encode()
            + content
        )
        await self.writer.drain()
        return self.reader

    async def vanish(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.fixture
def slow(rig: Rig, stack: Stack) -> Iterator[Door]:
    """A gateway with one replica that takes 150 ms a step."""
    door = rig.gateway(stack.ports.allot("slow-public"), stack.ports.allot("slow-internal"))
    rig.ready(door.child, rig.worker(WORKER_STEP_MS="150"))
    door.sees(1)
    yield door
    assert "a part failed" not in door.child.output()


@asynccontextmanager
async def finished(rig: Rig) -> AsyncIterator[list[RequestFinished]]:
    """Every RequestFinished from now on."""
    rows: list[RequestFinished] = []
    async with Reader(rig.settings, {FINISHED: dict.fromkeys(range(8), "end")}, "finished") as reader:

        async def read() -> None:
            async for records in reader:
                rows.extend(record.value for record in records if isinstance(record.value, RequestFinished))

        task = asyncio.create_task(read())
        yield rows
        task.cancel()
        await asyncio.wait({task})


async def test_in_each_phase(rig: Rig, slow: Door) -> None:
    async with finished(rig) as rows:
        await vanish_in_each_phase(rig, slow, rows)


async def vanish_in_each_phase(rig: Rig, slow: Door, rows: list[RequestFinished]) -> None:
    model, client = rig.model.name, Raw(slow)
    long = body(model, "x", 5000)

    # with half a body sent
    await client.send(long[:50], len(long))
    await client.vanish()
    # before admission: the replica does not even read
    worker = rig.children[-1]
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        await client.send(long)
        await until(lambda: slow.metric("lorafleet_gateway_open_requests") == 1, 10, "the request is open")
        await client.vanish()
        await until(lambda: slow.metric("lorafleet_gateway_open_requests") == 0, 10, "the request is closed")
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    # before the first token
    await client.send(long)
    await until(lambda: slow.metric("lorafleet_gateway_open_requests") == 1, 10, "the request is open")
    await client.vanish()
    # in the middle of the stream
    reader = await client.send(long)
    await reader.readuntil(b'"content":"')
    await reader.readuntil(b'"content":"')
    await until(lambda: slow.rows() > 0, 10, "it runs")
    await client.vanish()
    # without streaming
    await client.send(body(model, "x", 5000, stream=False))
    await until(lambda: slow.metric("lorafleet_gateway_open_requests") == 1, 10, "the request is open")
    await client.vanish()

    await until(lambda: slow.metric("lorafleet_gateway_open_requests") == 0, 10, "none is open")
    await until(lambda: slow.rows() == 0, 20, "no row is left")
    await until(lambda: len(rows) >= 4, 10, "each is told of")
    assert [row.outcome for row in rows] == [Outcome.CANCELLED] * 4
    assert len({row.request_id for row in rows}) == 4
    assert rows[2].output_tokens >= 1
    assert rows[2].ttft_ms >= 0


async def test_one_that_does_not_read_is_cut_off(fleet: Rig, door: Door) -> None:
    client = Raw(door)
    async with finished(fleet) as rows:
        await client.send(body(fleet.model.name, "x", 8000), buffer=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(rows) == 1, 60, "it has ended")
    assert (rows[0].outcome, rows[0].detail) == (Outcome.CANCELLED, "cancelled: the client reads too slowly")
    await client.vanish()
