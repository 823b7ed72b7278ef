"""The listening ports: what aiohttp is told about connections and bodies, for both of them.

A connection that says nothing is closed after `idle_s`, one that never finishes its first headers too: nobody can hold
sockets without a key. Bodies come as they were sent (see middleware.py). What no handler gets to see is answered as the
API answers, too. What is no HTTP is counted, never logged: the faulty line may be the one with the key.
"""

import logging
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from gateway.errors import ApiError
from gateway.metrics import Metrics
from gateway.middleware import error_answer, from_http

IDLE_S = 75.0  # longer than the minute for which proxies keep connections
CLEANUP_S = 1.0
NO_HTTP = "this is no HTTP that can be read: its first line, a header or the body's frame is malformed or too long"


class Connection(web.RequestHandler):
    """One connection: aiohttp's, but for the words of its errors."""

    __slots__ = ("_metrics",)

    def __init__(self, server: "Server", metrics: Metrics, **told: Any) -> None:
        super().__init__(server, **told)
        self._metrics = metrics

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP, and what failed outside of every handler. Raises ConnectionError if headers have left."""
        if isinstance(exc, HttpProcessingError):
            answer = error_answer(ApiError("invalid_request", NO_HTTP), self._metrics)
        else:
            super().handle_error(request, status, exc, message)  # logs it
            answer = error_answer(ApiError("internal", "the request failed here: it is in our log"), self._metrics)
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Refusals that come before any middleware, as that of an Expect header."""
        if isinstance(resp, web.HTTPException):
            resp = error_answer(from_http(request, resp), self._metrics)
        return await super().finish_response(request, resp, start_time)


class Server(web.Server):
    """Makes the connections of `server`, which aiohttp has set up."""

    def __init__(self, server: web.Server, metrics: Metrics) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )
        self._metrics = metrics

    def __call__(self) -> Connection:
        return Connection(self, self._metrics, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    __slots__ = ("_metrics",)

    def __init__(self, app: web.Application, metrics: Metrics, **told: Any) -> None:
        super().__init__(app, **told)
        self._metrics = metrics

    async def _make_server(self) -> web.Server:
        return Server(await super()._make_server(), self._metrics)


async def listen(
    app: web.Application,
    name: str,
    host: str,
    port: int,
    metrics: Metrics,
    idle_s: float = IDLE_S,
    tls: ssl.SSLContext | None = None,
) -> web.AppRunner:
    """Serves `app` until the runner's `cleanup`. `name` is the port's own, in the log. Raises OSError."""
    runner = Runner(
        app,
        metrics,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CLEANUP_S,
        keepalive_timeout=idle_s,
        auto_decompress=False,
        logger=logging.getLogger(f"{__name__}.{name}"),
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_address=True, ssl_context=tls).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
