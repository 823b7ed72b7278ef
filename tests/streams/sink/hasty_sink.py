"""The sink with a reconciler that does not wait for long: `... hasty_sink [before|during|after]`.

With an argument it kills itself there, at the writing of the first row that closes a request.
"""

import asyncio
import os
import signal
import sys
from typing import Any

from streams.bus.writer import Writer
from streams.sink import dead_gateways, reconciler
from streams.sink.__main__ import run
from streams.sink.settings import SinkSettings
from streams.sink.warehouse import Warehouse

dead_gateways.OVER_S = 1.0
reconciler.ROUND_S = 0.5


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingWriter(Writer):
    when = ""

    def send_nowait(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        if self.when == "before":
            _die()
        sent = super().send_nowait(*args, **kwargs)
        if self.when == "during":
            asyncio.get_running_loop().call_later(0.003, _die)
        if self.when == "after":
            sent.add_done_callback(lambda _: _die())
        return sent


if __name__ == "__main__":
    if sys.argv[1:]:
        DyingWriter.when = sys.argv[1]
        reconciler.Writer = DyingWriter  # type: ignore[attr-defined]
    settings = SinkSettings.from_env()
    asyncio.run(run(settings, Warehouse(settings.clickhouse_url)))
