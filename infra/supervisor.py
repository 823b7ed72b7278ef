"""The supervisor of one stack: `async with running(options, progress) as stack` starts it, keeps it alive, stops it.

Owns the home folder (lock) and every process of the stack. Order: broker, store, ClickHouse and model side by side;
topics, tables and the operator's key as soon as theirs is up; then our own processes, which wait for what they need.
Stops in the reverse order. Dies by kill -9: the kernel kills every part (local/leash.py), and the next start looks for
what may have been left.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from infra.clickhouse import schema
from infra.fleet_env import Embedded, fleet_env, own_clickhouse, own_kafka, own_store
from infra.home import Home, left_overs, mark_of, stop_processes
from infra.keeper import Keeper, ended
from infra.local.child import Child, ChildError, Spec, python
from infra.local.clickhouse import ClickHouse
from infra.local.kafka import Kafka
from infra.local.ports import Ports, is_free
from infra.local.store import Store
from infra.operator_key import operator_key, publish_operator
from infra.options import StackOptions
from infra.part import Part
from infra.processes import gateway, process, public_url, worker
from infra.progress import Progress
from infra.state import StackState, write_state
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings

GATEWAY_PORT = 8000  # taken if it is free


class Stack:
    """A running stack. `environment` is what its processes were given; every URL is on 127.0.0.1."""

    def __init__(self, options: StackOptions, progress: Progress) -> None:
        self._home = options.home.absolute()
        self._options = options
        self._progress = progress
        self._ports = Ports(self._home / "ports.json")
        self._layers: list[list[Keeper]] = []  # in the order of starting
        self._tasks: list[asyncio.Task[None]] = []
        self.operator_key = operator_key(self._home)
        self.environment: dict[str, str] = {}
        self.gateway_urls: list[str] = []
        self.internal_urls: list[str] = []

    async def start(self) -> None:
        """Returns when everything serves. Raises ChildError, SettingsError, BusUnavailable, BadModel."""
        embedded = self._embedded()
        self.environment = fleet_env(self._home, embedded)
        kafka = KafkaSettings.from_env({**os.environ, **self.environment})
        ours = self._gateway_ports()
        async with _together() as group:
            group.create_task(self._broker(embedded.kafka, kafka), name="kafka")
            group.create_task(self._tables(embedded.clickhouse), name="clickhouse")
            if embedded.store:
                group.create_task(self._up(self._service(embedded.store)), name="store")
            model = group.create_task(self._model(), name="model")
        self.environment["LORAFLEET_MODEL"] = str(model.result())
        await self._processes(ours, take_over=embedded.kafka is not None)

    async def serve(self) -> None:
        """Runs for ever. Raises what a keeper could not handle."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Ends every part, the last started first. Once it has returned, nothing of the stack is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for layer in reversed(self._layers):
            await asyncio.gather(*(keeper.stop() for keeper in layer))

    def hurry(self) -> None:
        """Kills every part at once, for someone who does not want to wait for stop()."""
        for layer in self._layers:
            for keeper in layer:
                keeper.kill()

    def _service(self, service: Kafka | Store | ClickHouse, before: tuple[Spec, ...] = ()) -> Part:
        def prepare() -> Spec:
            spec = service.prepare()
            return replace(spec, env={**spec.env, **mark_of(self._home)})

        return Part(service.name, prepare, lambda child: service.ready(), address=service.address, before=before)

    def _embedded(self) -> Embedded:
        logs, allot = self._home / "logs", self._ports.allot
        kafka = store = clickhouse = None
        if not own_kafka():
            kafka = Kafka(self._home / "kafka", allot("kafka"), allot("kafka-controller"), log=logs / "kafka.log")
        if not own_store():
            store = Store(self._home / "store", allot, log=logs / "store.log")
        if not own_clickhouse():
            clickhouse = ClickHouse(self._home / "clickhouse", allot("clickhouse"), log=logs / "clickhouse.log")
        return Embedded(kafka, store, clickhouse)

    def _gateway_ports(self) -> list[tuple[int, int]]:
        """(public, internal) of each gateway."""
        ports = []
        for place in range(self._options.gateways):
            if self._options.port is not None:
                public = self._options.port + place
                if not is_free(public):
                    raise ChildError(f"--port {public}: something listens there already; give another one")
            else:
                public = self._ports.allot(f"gateway-{place}", GATEWAY_PORT + place)
            ports.append((public, self._ports.allot(f"gateway-{place}-internal")))
        self.gateway_urls = [public_url(public) for public, _ in ports]
        self.internal_urls = [f"http://127.0.0.1:{internal}" for _, internal in ports]
        return ports

    async def _broker(self, kafka: Kafka | None, settings: KafkaSettings) -> None:
        if kafka:
            log = self._home / "logs" / "kafka.log"
            fetch = Spec("kafka", python("infra.local.kafka"), log=log, env=mark_of(self._home))
            await self._up(self._service(kafka, before=(fetch,)))
        await ensure_topics(settings)
        await publish_operator(settings, self.operator_key)

    async def _tables(self, clickhouse: ClickHouse | None) -> None:
        if clickhouse:
            await self._up(self._service(clickhouse))
        await asyncio.to_thread(schema.apply, self.environment["CLICKHOUSE_URL"])

    async def _model(self) -> Path:
        began_s, log = asyncio.get_running_loop().time(), self._home / "logs" / "model.log"
        self._progress.waits("model")
        child = Child(Spec("model", python("infra.local.model"), log=log, env=mark_of(self._home)))
        try:
            code = await ended(child)
        finally:
            child.kill()
            child.stop()
        if code:
            raise ChildError(child.last_words(1))
        folder = Path(child.last_words(1))
        self._progress.done("model", str(folder), asyncio.get_running_loop().time() - began_s)
        return folder

    async def _processes(self, ports: Sequence[tuple[int, int]], take_over: bool) -> None:
        """`take_over`: the broker is ours alone, so whoever held a place in it is dead."""
        home, replicas = self._home, self._options.replicas
        env = {**self.environment, **mark_of(home)}
        layers = [
            [process(name, f"streams.{name}", env, home / "logs") for name in ("control", "sink")],
            [worker(place, replicas, env, home, take_over) for place in range(replicas)],
            [gateway(place, *pair, env, home, take_over) for place, pair in enumerate(ports)],
        ]
        async with _together() as group:
            for number, layer in enumerate(layers, start=1):
                for part in layer:
                    group.create_task(self._up(part, number), name=part.name)

    async def _up(self, part: Part, layer: int = 0) -> None:
        """Starts the part and keeps it from then on."""
        keeper = Keeper(part, self._progress, self._write_state)
        while len(self._layers) <= layer:
            self._layers.append([])
        self._layers[layer].append(keeper)
        await keeper.start()
        self._tasks.append(asyncio.create_task(keeper.keep(), name=f"keep {part.name}"))

    def _write_state(self) -> None:
        parts = [keeper.state() for layer in self._layers for keeper in layer]
        state = StackState(os.getpid(), self.gateway_urls, self.internal_urls, self.environment, parts)
        write_state(self._home, state)


@contextlib.asynccontextmanager
async def running(options: StackOptions, progress: Progress) -> AsyncIterator[Stack]:
    """A stack that serves, until the body ends. Raises HomeInUse, and what Stack.start() raises."""
    with Home(options.home) as home:
        if found := await asyncio.to_thread(left_overs, home.folder):
            names = ", ".join(f"{process.pid}" for process in found)
            progress.note(f"left over from a run that was killed, now stopped: processes {names}")
            await asyncio.to_thread(stop_processes, found)
        stack = Stack(options, progress)
        with _logged(home.folder / "logs" / "supervisor.log"):
            try:
                await stack.start()
                yield stack
            finally:
                progress.close()
                await stack.stop()


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What libraries warn of goes where the parts' logs are, not between the lines that people read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@contextlib.asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first failure itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
