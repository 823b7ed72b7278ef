"""`python -m workers`: one replica. Reads top to bottom as what it is made of.

requests -> intake -> inbox -> engine -> steps -> publisher -> tokens; tables and commands from the side, beats out.
Exit status: 0 told to end, 1 a fault, 2 bad settings, 3 the engine crashed, 4 replaced by a newer claim, 5 place taken.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from schemas.engine import Ready
from schemas.reasons import FinishReason
from schemas.replicas import ENGINE_CRASHED, ReplicaClaim, ReplicaStatus, Residency
from schemas.stats import AttemptFinished, CacheEvent
from schemas.tokens import LoadReport
from schemas.topics import REPLICA_COMMANDS, REPLICAS, REQUESTS
from streams.adapters.locations import parse_location
from streams.adapters.shape import ModelShape
from streams.adapters.store import open_store
from streams.bus.errors import BusError
from streams.bus.reader import Reader
from streams.bus.writer import Writer
from streams.presence.claim import Beats, Claim, PlaceTakenError, ReplacedError
from workers import steps
from workers.answers import Answers
from workers.commands import Commands
from workers.engine_client import EngineClient, EngineCrashedError
from workers.heartbeat import Heartbeat
from workers.inbox import Inbox
from workers.intake import Intake
from workers.ledger import Ledger
from workers.loader.folders import Folders
from workers.loader.governor import Governor
from workers.loader.images import Base
from workers.loader.loader import Loader
from workers.loader.pulls import Pulls
from workers.loading import Loading
from workers.publisher import Publisher
from workers.sequences import Sequences
from workers.settings import SettingsError, WorkerSettings
from workers.tables import Tables
from workers.tiers import Tiers
from workers.unloading import Unloading

if TYPE_CHECKING:
    from streams.tracing.exporter import Exporter

log = logging.getLogger("worker")

FAULT, BAD_SETTINGS = 1, 2
STATUS = {EngineCrashedError: 3, ReplacedError: 4, PlaceTakenError: 5}
FETCH_WAIT_MS = 250  # of an idle fetch; one partition each, so nothing new ever waits behind another's
LAST_TOKENS_S, DRAIN_LIMIT_S, LOADER_LIMIT_S = 0.2, 2.0, 3.0


class Left(Exception):
    """Told to end, and done with what ran."""


class Worker:
    """One life of one replica: `start` takes the place, `serve` holds it, `end` says the last word."""

    def __init__(self, settings: WorkerSettings) -> None:
        kafka, replica = settings.kafka, settings.replica
        self.settings = settings
        self.leaving = asyncio.Event()
        self.engine = EngineClient(settings)
        self.tables = Tables(kafka, replica)
        self.requests = Reader(
            kafka,
            {REQUESTS: {replica: "end"}},
            f"worker-{replica}-requests",
            fetch_wait_ms=FETCH_WAIT_MS,
            max_records=200,
        )
        self.commands = Reader(
            kafka, {REPLICA_COMMANDS: {replica: "end"}}, f"worker-{replica}-commands", fetch_wait_ms=FETCH_WAIT_MS
        )
        self.tokens = Writer(kafka, f"worker-{replica}-tokens")
        self.cold = Writer(kafka, f"worker-{replica}-cold")
        self.exporter: Exporter | None = None
        if settings.traces:
            from streams.tracing import exporter  # OpenTelemetry takes half a second to import

            self.exporter = exporter.Exporter("lorafleet-worker", replica)
        self.loader: Loader | None = None  # begun with the claim: an earlier holder may use its images until then

    async def start(self) -> tuple[Ready, Claim]:
        """The base is loaded while the place is waited for; only then is it claimed."""
        s = self.settings
        for part in (self.tables.reader, self.tokens, self.cold):
            await part.start()
        async with asyncio.TaskGroup() as group:
            loaded = group.create_task(self.engine.start(), name="engine")
            group.create_task(self.requests.start(), name="requests")
            group.create_task(self.commands.start(), name="commands")
            group.create_task(self._place_free(), name="place")
        ready = loaded.result()

        async def noted() -> int:
            return self.requests.position(REQUESTS, s.replica)

        def claim(nonce: str, start_offset: int) -> ReplicaClaim:
            return ReplicaClaim(
                s.replica, nonce, start_offset, ready.base_hash, ready.numeric_class, int(time.time() * 1000)
            )

        return ready, await self.tables.place.claim(self.cold, noted, claim, s.take_over)

    async def _place_free(self) -> None:
        await self.tables.reader.caught_up()
        if self.settings.take_over:
            await self.tables.place.bury(self.cold)  # loading the base takes seconds, and streams wait
        await self.tables.place.wait_free(self.settings.take_over)

    async def serve(self, ready: Ready, claim: Claim) -> int:
        s, tables, engine = self.settings, self.tables, self.engine
        sequences = Sequences(s.replica, claim.incarnation)
        ledger = Ledger(self.cold)
        inbox = Inbox(
            claim.incarnation, ready.base_hash, ready.context_length, s.max_open, tables.adapter, tables.is_ghost
        )

        base = Base(ready.base_hash, ModelShape.of(Path(s.model)), s.slot_ranks)
        store = open_store(parse_location(s.store), s.s3)
        folders = Folders(Path(s.data))
        governor = Governor()

        def told_of(event: CacheEvent) -> None:
            ledger.cache(event)
            governor.event(event, time.monotonic())

        loader = Loader(folders, store, base, s.disk_bytes, s.ram_bytes, told_of, s.replica, claim.incarnation)
        self.loader = loader
        await loader.start()

        def load() -> LoadReport:
            return sequences.load(intake.read_offset)

        def ended(row: AttemptFinished) -> None:
            ledger.attempt(row)
            if traces is not None:
                traces.ended(row)

        def residency() -> Residency:
            slots, ram, disk = (
                [adapter for content in tier for adapter in tables.ids(content)]
                for tier in (loading.residency.contents(), loader.ram.names(), loader.disk.names())
            )
            return Residency(slots, ram, disk, *loading.residency.per_minute(time.monotonic()))

        def drain() -> None:
            inbox.draining, heartbeat.status = True, ReplicaStatus.DRAINING
            beats.hurry()

        async def leave() -> None:
            """Draining first, so that nothing new comes; then what runs gets its time."""
            await self.leaving.wait()
            log.info("told to end: %d attempts run", len(sequences))
            drain()
            limit = time.monotonic() + s.drain_s
            while inbox.open or len(sequences):
                if time.monotonic() > limit:
                    log.warning("%d attempts are left to others after %g s", len(sequences), s.drain_s)
                    break
                await asyncio.sleep(0.02)
            raise Left

        async def say_ready() -> None:
            await beats.first.wait()
            gc.freeze()  # what the start has left is for good: no collection need walk it
            print(f"ready replica={s.replica} incarnation={claim.incarnation}", flush=True)

        traces = None
        if self.exporter is not None:
            from workers.traces import Traces

            traces = Traces(self.exporter.tracer, s.replica, claim.incarnation)
        loading = Loading(engine, loader, told_of, s.replica, claim.incarnation, tables.by_content)
        unloading = Unloading(loading, sequences.users)
        inbox.closed = unloading.closed
        answers = Answers(lambda: beats.hurry())
        pulls = Pulls(s.replica, tables, loader, folders, base, governor.thrashing, s.pull_bytes_per_s)
        tiers = Tiers(loader, loading, pulls, governor)
        intake = Intake(self.requests, s.replica, inbox, sequences, engine, loading, pulls.usage, traces)
        publisher = Publisher(self.tokens, s.replica, claim.incarnation, load, tables.is_ghost)
        heartbeat = Heartbeat(
            claim, ready, s.capacity_tokens, engine, sequences, load, residency, tiers.report,
            answers.told, loading.failed_loads.told,
        )  # fmt: skip
        beats = Beats(self.cold, REPLICAS, s.replica, heartbeat.beat)
        commands = Commands(self.commands, tables.adapter, loading, unloading, answers, drain)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    steps.follow(engine, sequences, inbox, loading, publisher, ended, tiers), name="steps"
                )
                group.create_task(engine.watch(), name="engine watch")
                group.create_task(tables.place.watch(), name="place watch")
                group.create_task(tables.listen(), name="tables")
                group.create_task(loading.run(), name="loading")
                if s.pull_bytes_per_s:
                    group.create_task(pulls.run(), name="pulls")
                group.create_task(unloading.run(tables.retired), name="retired")
                group.create_task(tiers.audit(), name="audit")
                group.create_task(intake.read(publisher), name="intake")
                group.create_task(intake.tick(publisher), name="intake tick")
                group.create_task(commands.obey(), name="commands")
                group.create_task(beats.run(), name="beats")
                group.create_task(say_ready(), name="ready")
                group.create_task(leave(), name="leave")
        except BaseExceptionGroup as errors:
            error = gravest(errors)
        if isinstance(error, ReplacedError):
            publisher.silence()
            await asyncio.gather(self.tokens.stop(0), self.cold.stop(0))
            return told(error)
        if isinstance(error, EngineCrashedError):
            # Its last tokens first, if the broker takes them right away: what they bring need not be computed again.
            await publisher.drained(LAST_TOKENS_S)
            await beats.last(lambda number: heartbeat.gone(number, ENGINE_CRASHED))
            for row in sequences.abandoned(time.monotonic(), FinishReason.ERROR):
                ended(row)
        else:
            for row in sequences.abandoned(time.monotonic(), FinishReason.CANCELLED):
                ended(row)
            await publisher.drained(DRAIN_LIMIT_S)
            await beats.last(lambda number: heartbeat.gone(number, "left" if isinstance(error, Left) else repr(error)))
        await ledger.drained(DRAIN_LIMIT_S)
        return told(error)

    async def stop(self) -> None:
        """Ends whatever was started; every part does so in bounded time."""
        parts = [self.tokens.stop(0), self.cold.stop(0), self.requests.stop(), self.commands.stop()]
        parts += [self.engine.stop(), self.tables.reader.stop()]
        if self.exporter is not None:
            parts.append(self.exporter.stop())
        if self.loader is not None:
            parts.append(self._loader_stopped(self.loader))
        for result in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("while stopping: %r", result)

    @staticmethod
    async def _loader_stopped(loader: Loader) -> None:
        async with asyncio.timeout(LOADER_LIMIT_S):  # a download that hangs ends with the process
            await loader.stop()


async def run(settings: WorkerSettings) -> int:
    """One life, from start to exit status."""
    worker = Worker(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.leaving.set)
    try:
        start = asyncio.create_task(worker.start(), name="start")
        leaving = asyncio.create_task(worker.leaving.wait(), name="leaving")
        await asyncio.wait({start, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not start.done():
            start.cancel()
            await asyncio.wait({start})
            return 0
        try:
            ready, claim = start.result()
        except Exception as error:
            return told(gravest(error))
        return await worker.serve(ready, claim)
    finally:
        await worker.stop()


def gravest(error: BaseException) -> BaseException:
    """Of several errors at once the one that decides how to end: to be replaced forbids any further word."""
    leaves = list(_leaves(error))
    return next((e for kind in (ReplacedError, EngineCrashedError) for e in leaves if isinstance(e, kind)), leaves[0])


def told(error: BaseException) -> int:
    """Logs why the worker ends; the exit status."""
    match error:
        case Left():
            log.info("left")
            return 0
        case ReplacedError() | EngineCrashedError() | PlaceTakenError():
            log.error("%s: %s", type(error).__name__, error)
        case _:
            log.error("a fault ends this worker", exc_info=error)
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), FAULT)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        settings = WorkerSettings.from_env()
    except (SettingsError, BusError) as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    print(settings, flush=True)
    return uvloop.run(run(settings))


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # not sys.exit, which would wait for the thread of a download that hangs
