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
