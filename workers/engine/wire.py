"""Frames of the engine protocol (schemas/engine.py) on a local stream socket, for both sides.

A frame is 4 bytes little-endian length, then a msgpack body. Each direction is in order; the end of the stream means
that the other side is gone. A frame that does not decode is a bug or a version mix and ends the connection.
"""

import asyncio
import socket
import struct
from typing import cast

import msgspec

from schemas.engine import Command, Event

MAX_FRAME_BYTES = 64 * 1024 * 1024
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


def read_command(stream: socket.socket) -> Command | None:
    """The engine's side, blocking: the next command, None at the end of the stream. Raises BadFrame."""
    head = _read_exactly(stream, _LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(stream, _length(head))
    return None if body is None else cast(Command, _decoded(_COMMANDS, body))


def _length(head: bytes) -> int:
    length = int(_LENGTH.unpack(head)[0])
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return length


def _decoded(decoder: msgspec.msgpack.Decoder[Command] | msgspec.msgpack.Decoder[Event], body: bytes) -> object:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadFrame(str(error)) from error


def _read_exactly(stream: socket.socket, count: int) -> bytes | None:
    parts, left = [], count
    while left:
        try:
            part = stream.recv(min(left, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
