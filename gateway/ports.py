"""The listening ports: what aiohttp is told about connections and bodies, for both of them.

A connection that says nothing is closed after `idle_s`, one that never finishes its first headers too: nobody can hold
sockets without a key. Bodies come as they were sent (see middleware.py). What is no HTTP is answered and counted, never
logged: the faulty line may be the one with the key.
"""

import logging

from aiohttp import web
from aiohttp.http import HttpProcessingError

from gateway.metrics import Metrics

IDLE_S = 75.0  # longer than the minute for which proxies keep connections
CLEANUP_S = 1.0


class Malformed(logging.Filter):
    """Takes what is no HTTP out of aiohttp's log, and counts it."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError):
            return True
        self._metrics.refused("invalid_request")
        return False


async def listen(
    app: web.Application, name: str, host: str, port: int, metrics: Metrics, idle_s: float = IDLE_S
) -> web.AppRunner:
    """Serves `app` until the runner's `cleanup`. `name` is the port's own, in the log. Raises OSError."""
    log = logging.getLogger(f"{__name__}.{name}")
    log.addFilter(Malformed(metrics))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CLEANUP_S,
        keepalive_timeout=idle_s,
        auto_decompress=False,
        logger=log,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_address=True).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
