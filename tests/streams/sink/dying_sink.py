"""The sink, killed by itself at its first insert into a table: `... dying_sink TABLE before|during|after`."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from streams.sink.__main__ import run
from streams.sink.settings import SinkSettings
from streams.sink.warehouse import Warehouse


class DyingWarehouse(Warehouse):
    def __init__(self, url: str, table: str, when: str) -> None:
        super().__init__(url)
        self._table = table
        self._when = when

    async def insert(self, table: str, columns: Sequence[str], lines: Sequence[bytes], token: str = "") -> None:
        dies = table == self._table and (table != "sink_progress" or b"finished" in lines[0])
        if dies and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and self._when == "during":
            asyncio.get_running_loop().call_later(0.005, os.kill, os.getpid(), signal.SIGKILL)
        await super().insert(table, columns, lines, token)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings = SinkSettings.from_env()
    asyncio.run(run(settings, DyingWarehouse(settings.clickhouse_url, *sys.argv[1:])))
