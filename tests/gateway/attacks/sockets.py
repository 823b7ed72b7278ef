"""Websockets, frame by frame, by hand."""

import asyncio
import contextlib
import json
import os
import struct
from dataclasses import dataclass

from tests.gateway.attacks.target import MALLORY, Attack, Got, Target, counted

TEXT, BINARY, CLOSE, PING, CONTINUED, LAST = 1, 2, 8, 9, 0, 0x80
NO_MESSAGE, PROTOCOL, NO_TEXT, TOO_LARGE = 1003, 1002, 1007, 1009


@dataclass
class Socket:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def told(self) -> tuple[int, bytes]:
        """The next frame's first byte and payload."""
        first, size = await self.reader.readexactly(2)
        if size == 126:
            [size] = struct.unpack("!H", await self.reader.readexactly(2))
        elif size == 127:
            [size] = struct.unpack("!Q", await self.reader.readexactly(8))
        return first, await self.reader.readexactly(size)

    async def end(self, limit_s: float = 15) -> int:
        """The code with which the gateway closes; 0: without one."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    first, payload = await self.told()
                    if first & 0xF == CLOSE:
                        return int(struct.unpack("!H", payload[:2])[0]) if payload else 0
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0
        except TimeoutError:
            return -1


def frame(first: int, payload: bytes, size: int | None = None, masked: bool = True) -> bytes:
    """`size`: what it claims to have."""
    length = len(payload) if size is None else size
    told = bytes([length]) if length < 126 else b"\x7e" + struct.pack("!H", length) if length < 1 << 16 else b""
    told = told or b"\x7f" + struct.pack("!Q", length)
    if not masked:
        return bytes([first]) + told + payload
    mask = os.urandom(4)
    hidden = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload)) if len(payload) < 1 << 16 else payload
    return bytes([first, told[0] | 0x80]) + told[1:] + (mask if len(payload) < 1 << 16 else bytes(4)) + hidden


async def opened(target: Target, extra: str = "") -> Socket:
    host, port = target.door.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    writer.write(
        f"GET /v1/chat/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{extra}"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: Bearer {MALLORY}\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in head, head
    return Socket(reader, writer)


async def closes(target: Target, *frames: bytes, extra: str = "") -> int:
    socket = await opened(target, extra)
    with contextlib.suppress(ConnectionError):
        for one in frames:
            socket.writer.write(one)
            await socket.writer.drain()
    code = await socket.end()
    socket.writer.transport.abort()
    return code


async def garbage(target: Target) -> Got:
    got = [
        await closes(target, frame(LAST | TEXT, b"{}", masked=False)),
        await closes(target, frame(LAST | 0x40 | TEXT, b"{}")),
        await closes(
            target, frame(LAST | 0x40 | TEXT, b"{}"), extra="Sec-WebSocket-Extensions: permessage-deflate\r\n"
        ),
        await closes(target, frame(LAST | 3, b"")),
        await closes(target, frame(LAST | 0xF, b"")),
        await closes(target, frame(LAST | CONTINUED, b"{}")),
        await closes(target, frame(TEXT, b"{"), frame(LAST | TEXT, b"}")),
        await closes(target, frame(LAST | PING, b"x" * 126)),
        await closes(target, frame(PING, b"x")),
        await closes(target, frame(LAST | CLOSE, b"x")),
        await closes(target, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10),
        await closes(target, os.urandom(4096)),
    ]
    return Got(counted(got), -1 not in got)


async def no_messages(target: Target) -> Got:
    got = [
        await closes(target, frame(LAST | BINARY, b"\x00" * 100)),
        await closes(target, frame(LAST | TEXT, b"\xff\xfe")),
        await closes(target, frame(LAST | TEXT, b"[" * 60_000)),
        await closes(target, frame(LAST | TEXT, b"")),
        await closes(target, frame(LAST | TEXT, b'{"type":"chat","id":"\\ud800","request":{}}')),
    ]
    return Got(counted(got), set(got) <= {NO_MESSAGE, NO_TEXT})


async def giants(target: Target) -> Got:
    before = target.memory_mb()
    got = [
        await closes(target, frame(LAST | TEXT, b"x", size=(1 << 63) - 1)),
        await closes(target, frame(LAST | TEXT, b"x", size=1 << 63)),
        await closes(target, frame(LAST | TEXT, b" " * (5 << 20))),
        await closes(target, frame(TEXT, b" "), *[frame(CONTINUED, b" " * (1 << 19))] * 12),
    ]
    more = target.memory_mb() - before
    return Got(f"{counted(got)}; {max(0, more):.0f} MB kept", set(got) <= {0, PROTOCOL, TOO_LARGE} and more < 100)


async def fragments(target: Target) -> Got:
    """One byte a frame, with pings between them: it is a message all the same."""
    socket = await opened(target)
    message = json.dumps({"type": "chat", "id": "f", "request": target.chat()}).encode()
    for at, byte in enumerate(message):
        first = (TEXT if at == 0 else CONTINUED) | (LAST if at == len(message) - 1 else 0)
        socket.writer.write(frame(first, bytes([byte])) + (frame(LAST | PING, b"") if at % 10 == 0 and at else b""))
    seen: list[str] = []
    async with asyncio.timeout(20):
        while "done" not in seen:
            first, payload = await socket.told()
            if first & 0xF == TEXT:
                seen.append(json.loads(payload)["type"])
    socket.writer.transport.abort()
    return Got(f"served: {seen[0]} .. {seen[-1]}", (seen[0], seen[-1]) == ("started", "done"))


async def pings(target: Target) -> Got:
    """50,000, and nobody reads the answers."""
    before, socket = target.memory_mb(), await opened(target)
    socket.writer.transport.pause_reading()  # type: ignore[attr-defined]
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(15):
            for _ in range(500):
                socket.writer.write(frame(LAST | PING, b"x" * 100) * 100)
                await socket.writer.drain()
    more = target.memory_mb() - before
    socket.writer.transport.abort()
    return Got(f"{max(0, more):.0f} MB kept", more < 100)


async def chats(target: Target) -> Got:
    """More chats than a socket may have, and cancels of chats that are others'."""
    socket, other = await opened(target), await opened(target)
    for number in range(70):
        asked = {"type": "chat", "id": f"c{number}", "request": target.chat(f"{number}", 500)}
        socket.writer.write(frame(LAST | TEXT, json.dumps(asked).encode()))
        other.writer.write(frame(LAST | TEXT, json.dumps({"type": "cancel", "id": f"c{number}"}).encode()))
    refused, cancelled, begun = 0, 0, set[str]()
    async with asyncio.timeout(30):
        while len(begun) + refused < 70:
            _, payload = await socket.told()
            told = json.loads(payload)
            refused += told["type"] == "error"
            cancelled += told["type"] == "cancelled"
            if told["type"] == "started":
                begun.add(told["id"])
    for one in (socket, other):
        one.writer.transport.abort()
    quiet = await target.quiet()
    return Got(
        f"{len(begun)} begun, {refused} refused, {cancelled} cancelled", (refused, cancelled) == (6, 0) and quiet
    )


ATTACKS = [
    Attack("websocket", "frames unmasked, reserved, out of order, no frames at all", garbage),
    Attack("websocket", "binary, no UTF-8, no message", no_messages),
    Attack("websocket", "messages of 8 EB announced, 5 MB, and 6 MB in pieces", giants),
    Attack("websocket", "a message of one byte a frame, pings among them", fragments),
    Attack("websocket", "50,000 pings whose answers nobody reads", pings),
    Attack("websocket", "70 chats on a socket, and cancels of another socket's chats", chats),
]
