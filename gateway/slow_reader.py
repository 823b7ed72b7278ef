"""What waits for a client that does not read: no more than fits the socket's buffers, and not for long."""

import socket

from aiohttp import web

WRITE_LIMIT_S = 10.0
SEND_BUFFER_BYTES = 64 << 10


def bound(request: web.Request) -> None:
    """The kernel would otherwise take megabytes for a client that reads nothing."""
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def has_room(request: web.Request, size: int) -> bool:
    """Whether the transport takes `size` bytes without a wait: it holds none, and they are fewer than it may hold."""
    transport = request.transport
    return transport is not None and transport.get_write_buffer_size() == 0 and size < SEND_BUFFER_BYTES // 2
