"""Frames of the engine protocol (schemas/engine.py) on a local stream socket, for both sides.

A frame is 4 bytes little-endian length, then a msgpack body. Each direction is in order; the end of the stream means
that the other side is gone. A frame that does not decode is a bug or a version mix and ends the connection.
"""

import asyncio
import select
import socket
import struct
from collections.abc import Iterator
from typing import cast

import msgspec

from schemas.engine import Command, Event

MAX_FRAME_BYTES = 64 * 1024 * 1024
_READ_BYTES = 1 << 20
_AHEAD_BYTES = 1 << 20  # a worker that is this far behind stops the engine until it reads
_LENGTH = struct.Struct("<I")
_PACK = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class BadFrame(Exception):
    """The bytes are not a frame of this protocol."""


def frame(message: Command | Event) -> bytes:
    """The message as one frame."""
    body = _PACK.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """The worker's side: the next event, None at the end of the stream. Raises BadFrame."""
    try:
        length = _length(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return cast(Event, _decoded(_EVENTS, body))


def _length(head: bytes | bytearray) -> int:
    length = int(_LENGTH.unpack(head)[0])
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return length


def _decoded(
    decoder: msgspec.msgpack.Decoder[Command] | msgspec.msgpack.Decoder[Event], body: bytes | bytearray
) -> object:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from error


class CommandStream:
    """The engine's side of the socket, for one thread. Raises ConnectionError once the worker is gone."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._in, self._out = bytearray(), bytearray()

    def hear(self, wait_s: float) -> list[Command]:
        """What has arrived; if nothing has, waits for it up to `wait_s`. Raises BadFrame."""
        self._send()
        if wait_s > 0:
            self._wait(select.POLLIN | (select.POLLOUT if self._out else 0), wait_s)
        try:
            data = self._stream.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the worker closed its end")
        self._in += data
        return list(self._frames())

    def say(self, event: Event) -> None:
        """Sends, or keeps for later what the socket does not take now; waits only if that is a lot."""
        self._out += frame(event)
        self._send()
        while len(self._out) > _AHEAD_BYTES:
            self._wait(select.POLLOUT)
            self._send()

    def flush(self) -> None:
        """Waits until all is sent."""
        while self._out:
            self._wait(select.POLLOUT)
            self._send()

    def _frames(self) -> Iterator[Command]:
        at = 0
        while len(self._in) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _length(self._in[at : at + _LENGTH.size])
            if end > len(self._in):
                break
            yield cast(Command, _decoded(_COMMANDS, self._in[at + _LENGTH.size : end]))
            at = end
        del self._in[:at]

    def _send(self) -> None:
        if self._out:
            try:
                del self._out[: self._stream.send(self._out)]
            except BlockingIOError:
                return

    def _wait(self, what: int, seconds: float | None = None) -> None:
        poll = select.poll()
        poll.register(self._stream, what)
        poll.poll(None if seconds is None else seconds * 1000)
