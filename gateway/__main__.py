"""The gateway process: `python -m gateway`. Socket -> requests; tokens -> socket.

Starts its ports at once, so that it can say why it is not ready; then topics, tables, place, and only then chats. Ends
on SIGTERM and SIGINT: takes nothing new, lets open requests end, says its last word.
Exit status: 0 told to end, 1 a fault, 2 bad settings, 4 replaced by a newer claim, 5 place taken.
"""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from gateway import request_log
from gateway.app import public_app
from gateway.auth import Keys
from gateway.base_model import BaseModel
from gateway.catalogue import Catalogue
from gateway.chat import Chat
from gateway.customer_changes import CustomerChanges
from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.flight import Ask
from gateway.history import History
from gateway.internal_adapters import InternalAdapters
from gateway.internal_app import internal_app
from gateway.internal_customers import InternalCustomers
from gateway.internal_keys import InternalKeys
from gateway.internal_replicas import InternalReplicas
from gateway.lease import Lease
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.orders import Orders
from gateway.pauses import Pauses
from gateway.ports import listen
from gateway.rates import Rates
from gateway.readiness import Readiness
from gateway.registrar import Registrar
from gateway.replica_metrics import ReplicaMetrics
from gateway.replies import Replies
from gateway.settings import GatewaySettings
from gateway.stats import Finishes
from gateway.switchboard import Switchboard
from gateway.tables import Tables
from gateway.usage import UsageShare
from gateway.websocket import ChatSockets
from schemas.placement import OwnerPlan
from schemas.reasons import Outcome
from schemas.stats import RequestFinished
from streams.bus.admin import ensure_topics
from streams.bus.errors import BusUnavailable, SettingsError, TopicMismatch
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from streams.presence.claim import PlaceTakenError, ReplacedError

if TYPE_CHECKING:
    from gateway.traces import Traces
    from streams.tracing.exporter import Exporter

log = logging.getLogger("gateway")

COLD_DELIVERY_S = 600.0  # what must not be lost waits this long for a broker that is away
FLUSH_S = 5.0
FAULT, BAD_SETTINGS = 1, 2
STATUS: dict[type[Exception], int] = {ReplacedError: 4, PlaceTakenError: 5}


async def serve(settings: GatewaySettings, model: BaseModel) -> None:
    """Runs until a signal comes. Raises ExceptionGroup when a part fails."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        gateway = Gateway(settings, model)
        await gateway.open(stack)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work, name=name) for name, work in gateway.work().items()]
            await stop.wait()
            log.info("stopping: %d requests are open", len(gateway.switchboard))
            await gateway.drain()
            for task in running:
                task.cancel()
        await gateway.lease.give_back()


class Gateway:
    """Every part, wired once. Read the constructor as the picture of the process."""

    def __init__(self, settings: GatewaySettings, model: BaseModel) -> None:
        kafka, place = settings.kafka, settings.place
        self.settings, self.metrics = settings, Metrics()
        # Hot and cold never share a connection: a slow acknowledgement of one would hold up the other.
        self.hot = Writer(kafka, "gateway-hot")
        self.pauses = Pauses(self._still_mine, lambda: self.tables.deaf_s, self.metrics.loop_lag.observe)
        self.cold = Writer(kafka, "gateway-cold", delivery_s=COLD_DELIVERY_S, may_write=self.pauses.may_write)
        # What the tables say.
        self.keys, self.catalogue = Keys(time.time), Catalogue(model.name, model.base_hash)
        plans: dict[str, OwnerPlan] = {}
        self.fleet = Fleet(model.base_hash, plans)
        traced = _traced(settings)
        self.exporter = None if traced is None else traced[0]
        traces = None if traced is None else traced[1]
        # The open requests, between the clients and the fleet.
        self.finishes = Finishes(self.cold)
        self.switchboard = Switchboard(
            self.hot,
            model.base_hash,
            self.fleet,
            lambda: self.tables.clock.now,
            self._resolve_anew,
            self._ended,
            traces,
        )
        self.replies = Replies(kafka, place, self.switchboard.heard, self.switchboard.gap)
        orders = Orders(self.cold, self.fleet)
        self.tables = Tables(
            kafka, place, self.keys, self.catalogue, self.fleet, plans,
            lost=self.switchboard.lost, promised=lambda: self.lease.hurry(), beaten=orders.heard,
        )  # fmt: skip
        self.lease = Lease(self.cold, place, self.tables, self.replies)
        self.readiness = Readiness(lambda: self.switchboard.clock.hearing and self.tables.clock.hearing)
        # The public port.
        self.rates = Rates()
        self.usage = UsageShare(kafka, self.cold, self.rates, self.keys.customer)
        chat = Chat(
            model, self.keys, self.catalogue, self.switchboard, self.readiness, self.rates, settings.request_limit_s,
            traces,
        )  # fmt: skip
        self.sockets = ChatSockets(chat, self.keys, self.readiness, traces)
        models = Models(model, self.keys, self.catalogue, self.readiness)
        self._public = public_app(
            chat, self.sockets, models, self.readiness, self.tables, self.fleet, self.metrics, settings.cors_origins,
            traces,
        )  # fmt: skip
        # The internal port.
        changes = CustomerChanges(self.keys, self.tables, self.cold, self.readiness)
        self.registrar = Registrar(kafka, self.cold, self.tables)
        self._internal = internal_app(
            InternalAdapters(
                self.keys,
                self.catalogue,
                self.registrar,
                History(kafka),
                self.readiness,
                self.fleet,
                lambda: self.tables.clock.now,
            ),
            InternalReplicas(
                self.keys, self.catalogue, self.fleet, self.tables, orders, self.readiness, kafka.replica_places
            ),
            InternalCustomers(changes),
            InternalKeys(changes, model.name),
            self.metrics,
        )
        self._watch()

    async def open(self, stack: AsyncExitStack) -> None:
        """Writers and ports; `stack` closes them, the ports first. Neither waits for Kafka."""
        if self.exporter is not None:
            stack.push_async_callback(self.exporter.stop)
        await self.hot.start()
        await self.cold.start()
        stack.push_async_callback(self._stop_writers)
        stack.push_async_callback(self.tables.stop)
        stack.push_async_callback(self.replies.stop)
        stack.push_async_callback(self.usage.stop)
        settings = self.settings
        tls = None if settings.tls is None else settings.tls.context()
        for app, name, host, port, secured in (
            (self._public, "public", settings.host, settings.port, tls),
            (self._internal, "internal", settings.internal_host, settings.internal_port, None),
        ):
            stack.push_async_callback((await listen(app, name, host, port, self.metrics, tls=secured)).cleanup)
            log.info("listening on %s:%d%s", host, port, ", with TLS" if secured else "")

    def work(self) -> dict[str, "asyncio._CoroutineLike[None]"]:
        """What runs for as long as the process does, by name."""
        return {
            "life": self._live(),
            "finished": self.finishes.run(),
            "registrar": self.registrar.run(),
            "pauses": self.pauses.run(),
        }

    async def drain(self) -> None:
        """Takes nothing new; open requests get `drain_s` to end, then are told to come again."""
        self.readiness.stopping = True
        await self.switchboard.emptied(self.settings.drain_s)
        self.switchboard.cancel_all(Outcome.UNAVAILABLE, "this gateway is shutting down")
        await self.sockets.close()
        await asyncio.sleep(0)  # the last ends are told in the loop's next turn
        await self.finishes.flush(FLUSH_S)

    async def _live(self) -> None:
        """Topics, tables, place; then everything that moves requests and tokens."""
        await _topics(self.settings.kafka)
        await self.tables.start()
        self.readiness.tables = True
        log.info("tables are caught up")
        await self.replies.start()
        claim = await self.lease.take(self.settings.take_over)
        self.switchboard.begin(claim)
        await self.usage.start(claim)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.tables.run(), name="tables")
            tasks.create_task(self.tables.place.watch(), name="place")
            tasks.create_task(self.lease.keep(), name="beats")
            tasks.create_task(self.replies.run(), name="replies")
            tasks.create_task(self.usage.hear(), name="others' usage")
            tasks.create_task(self.usage.tell(), name="own usage")
            tasks.create_task(self.switchboard.run(self.replies.age, self.tables.tick), name="clock")
            self.readiness.claimed = True
            while self.readiness.why_not() is not None:  # noqa: ASYNC110 - both readers' first word, in milliseconds
                await asyncio.sleep(0.02)
            gc.freeze()  # what the start has left is for good: no collection need walk it
            print(f"ready gateway={claim.place} incarnation={claim.incarnation}", flush=True)

    async def _still_mine(self) -> None:
        """Whether this gateway holds its place, if it has ever had it. Raises ReplacedError, BusUnavailable."""
        if self.switchboard.claimed:
            await self.tables.barrier()
            self.tables.place.check()

    async def _stop_writers(self) -> None:
        """Delivers what waits, unless somebody else holds the place: then not another word."""
        flush_s = FLUSH_S
        try:
            self.tables.place.check()
        except ReplacedError:
            flush_s = 0.0
        await asyncio.gather(self.hot.stop(flush_s), self.cold.stop(flush_s))

    def _resolve_anew(self, ask: Ask) -> Ask | None:
        """The alias may point elsewhere by now. None: there is no such model any more."""
        try:
            target = self.catalogue.resolve(ask.customer, ask.model, ask.conversation)
        except ApiError:
            return None
        if target.adapter == ask.adapter:
            return None
        return Ask(**{**ask.__dict__, "adapter": target.adapter, "content_id": target.content_id})

    def _ended(self, row: RequestFinished) -> None:
        self.finishes.note(row)
        self.metrics.ended(row)
        request_log.note(row)

    def _watch(self) -> None:
        """What Prometheus reads from the parts."""
        metrics, tables, replies, finishes = self.metrics, self.tables, self.replies, self.finishes
        metrics.gauge("open_requests", "Requests that are open.", lambda: len(self.switchboard))
        metrics.gauge("reserved_tokens", "That open requests may still need.", lambda: self.rates.reserved)
        metrics.gauge("ready", "1 if chats are taken.", lambda: float(self.readiness.why_not() is None))
        metrics.gauge("live_replicas", "Replicas that take work.", lambda: len(self.fleet.candidates(tables.clock.now)))
        metrics.gauge("quarantined_adapters", "Adapters that nobody is served by.", self.catalogue.quarantined)
        metrics.gauge("tables_age_seconds", "Since Kafka last answered.", lambda: tables.age(time.monotonic()))
        metrics.gauge("tokens_age_seconds", "Since Kafka last answered.", lambda: replies.age(time.monotonic()))
        metrics.gauge("finished_waiting", "Ended requests not yet written.", lambda: finishes.waiting)
        metrics.counter("finished_lost", "Ended requests that go unreported.", lambda: finishes.lost)
        metrics.counter("redrives", "Attempts that were begun anew elsewhere.", lambda: self.switchboard.redrives)
        metrics.registry.register(ReplicaMetrics(lambda: self.fleet.beats(tables.clock.now)))
        metrics.counter(
            "undecodable", "Records skipped since they do not fit.", lambda: tables.undecodable + replies.undecodable
        )


def _traced(settings: GatewaySettings) -> "tuple[Exporter, Traces] | None":
    if not settings.traces:
        return None
    from gateway.traces import Traces  # OpenTelemetry takes half a second to import
    from streams.tracing.exporter import Exporter

    exporter = Exporter("lorafleet-gateway", settings.place)
    return exporter, Traces(exporter.tracer)


async def _topics(kafka: KafkaSettings) -> None:
    """Waits for Kafka for as long as it takes. Raises TopicMismatch."""
    while True:
        try:
            return await ensure_topics(kafka)
        except BusUnavailable as error:
            log.warning("%s", error)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    request_log.set_up()
    try:
        settings = GatewaySettings.from_env()
    except SettingsError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return BAD_SETTINGS
    log.info("%r", settings)
    try:
        model = BaseModel.load(settings.model, settings.model_name)
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return BAD_SETTINGS
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, model))
    except Exception as error:
        return _status(error)
    return 0


def _status(error: Exception) -> int:
    """Tells why the process ends; its exit status."""
    status = FAULT
    for leaf in _leaves(error):
        if isinstance(leaf, ReplacedError | PlaceTakenError | TopicMismatch | OSError):
            log.error("%s", leaf)
        else:
            log.error("a part failed", exc_info=leaf)
        status = STATUS.get(type(leaf), status)
    return status


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


if __name__ == "__main__":
    sys.exit(main())
