"""The control process: `python -m streams.control`. Prints `ready` when it takes commands.

Not on any request's path: without it chat goes on, and commands wait in the log.
"""

import asyncio
import logging
import shutil
import signal
import sys

import faust

from streams.adapters.base_model import BadModel, base_hash
from streams.adapters.shape import ModelShape
from streams.adapters.sources import Sources
from streams.adapters.store import open_store
from streams.bus.admin import ensure_topics
from streams.bus.errors import BusError, SettingsError
from streams.bus.writer import Writer
from streams.control.app import make_app
from streams.control.compiler import Base, Compiler
from streams.control.demand import Demand
from streams.control.deployer import Deployer
from streams.control.registrar import Registrar
from streams.control.settings import ControlSettings

log = logging.getLogger("streams.control")

STOP_LIMIT_S = 8.0


async def run(settings: ControlSettings) -> None:
    """Until SIGTERM or SIGINT. Raises what ended it otherwise."""
    base = Base(await asyncio.to_thread(base_hash, settings.model), ModelShape.of(settings.model))
    compiler = Compiler(
        base, settings.max_rank, Sources(settings.sources, settings.s3), open_store(settings.store, settings.s3)
    )
    shutil.rmtree(settings.scratch, ignore_errors=True)  # what an earlier life left in the middle of its work
    settings.scratch.mkdir(parents=True)

    await ensure_topics(settings.kafka)
    stop, assigned = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Writer(settings.kafka, "control") as writer:
        deployer = Deployer(settings.kafka, writer, base.hash)
        registrar = Registrar(settings.kafka, writer, compiler, settings.scratch, deployer.note, settings.flip_limit_s)
        async with registrar.reader, deployer.reader:
            await registrar.reader.caught_up()
            app = make_app(settings.kafka, settings.instance, settings.scratch, registrar.handle, assigned.set)
            try:
                await app.start()
                async with asyncio.TaskGroup() as tasks:
                    watch = [
                        tasks.create_task(_tell_ready(assigned), name="ready"),
                        tasks.create_task(_until_it_ends(app, registrar, deployer), name="watch"),
                        tasks.create_task(deployer.run(registrar), name="deployer"),
                        tasks.create_task(Demand(settings.kafka, writer, deployer.trials.note).run(), name="demand"),
                    ]
                    await stop.wait()
                    for task in watch:
                        task.cancel()
            finally:
                await asyncio.wait_for(app.stop(), STOP_LIMIT_S)
                registrar.close()


async def _tell_ready(assigned: asyncio.Event) -> None:
    await assigned.wait()
    print("ready", flush=True)


async def _until_it_ends(app: faust.App, registrar: Registrar, deployer: Deployer) -> None:
    """Faust and the tables' readers run for ever; when one does not, the process ends and is started again."""
    faust_ended = asyncio.create_task(app.wait_until_stopped(), name="faust")
    try:
        readers = {registrar.reader.failed, deployer.reader.failed}
        await asyncio.wait({faust_ended, *readers}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        faust_ended.cancel()
    raise RuntimeError(f"the registry's consumer or reader ended: {app.crash_reason!r}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("faust", "mode", "aiokafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        settings = ControlSettings.from_env()
        log.info("%r", settings)
        asyncio.run(run(settings))
    except (SettingsError, BadModel, BusError, ValueError) as error:
        sys.exit(f"control: {error}")


if __name__ == "__main__":
    main()
