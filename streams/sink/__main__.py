"""`python -m streams.sink`: Kafka's `finished` and `cache-events` into ClickHouse; beside it the reconciler and the
mirror of the fleet's tables.

Prints `ready` when it has started. Runs until SIGTERM or SIGINT, which it may get at any moment, as it may kill -9.
Exit code 1: settings that cannot be used, or a second sink.
"""

import asyncio
import contextlib
import logging
import signal
import sys

from schemas.topics import CACHE_EVENTS, FINISHED
from streams.bus.errors import SettingsError
from streams.sink.mirror import Mirror
from streams.sink.reconciler import Reconciler
from streams.sink.settings import SinkSettings
from streams.sink.sink import SecondSink, TopicSink
from streams.sink.warehouse import Warehouse

log = logging.getLogger("streams.sink")


async def run(settings: SinkSettings, warehouse: Warehouse) -> None:
    """Raises SecondSink, in a group."""
    sinks = [TopicSink(settings.kafka, warehouse, topic) for topic in (FINISHED, CACHE_EVENTS)]
    try:
        starts = [await sink.recover() for sink in sinks]
        print("ready", flush=True)
        async with asyncio.TaskGroup() as group:
            for sink, start in zip(sinks, starts, strict=True):
                group.create_task(sink.follow(start))
            group.create_task(Reconciler(settings.kafka, warehouse, sinks[0]).run(), name="reconciler")
            group.create_task(Mirror(settings.kafka, warehouse).run(), name="mirror")
    finally:
        await warehouse.close()


async def until_stopped(settings: SinkSettings) -> None:
    task = asyncio.create_task(run(settings, Warehouse(settings.clickhouse_url)), name="sink")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = SinkSettings.from_env()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 1
    log.info("%r", settings)
    try:
        asyncio.run(until_stopped(settings))
    except ExceptionGroup as group:
        second, rest = group.split(SecondSink)
        if second is None or rest is not None:
            raise
        log.error("another sink writes to the same ClickHouse: this one ends; let only one run")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
