"""The real parts that tests run against, each started once per pytest run when first asked for, stopped by its id."""

import asyncio
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from aiokafka.admin import AIOKafkaAdminClient

from infra.local.child import Child, Spec
from infra.local.clickhouse import ClickHouse
from infra.local.kafka import Kafka, fetch
from infra.local.ports import Ports
from infra.local.store import Store

READY_LIMIT_S = 60


class Service(Protocol):
    """An embedded service of infra/local."""

    def prepare(self) -> Spec: ...

    def ready(self) -> bool: ...


def started(service: Service) -> Child:
    """The running child, once it is ready. Fails with its last words."""
    child = Child(service.prepare())
    wait_until(lambda: service.ready() or child.returncode() is not None, READY_LIMIT_S, child.spec.name)
    assert child.returncode() is None, f"{child.spec.name} ended:\n{child.last_words(20)}"
    return child


def wait_until(holds: Callable[[], bool], limit_s: float, what: str) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not so within {limit_s:g} s"
        time.sleep(0.05)


@contextmanager
def own_namespace(kafka: str) -> Iterator[str]:
    """A prefix for topic names that nobody else has; its topics go with it.

    A broker keeps some tens of kilobytes of each partition in its memory, whether anybody uses it or not.
    """
    namespace = f"t{uuid.uuid4().hex[:10]}."
    try:
        yield namespace
    finally:
        with ThreadPoolExecutor(1) as beside:  # no loop runs in its thread
            beside.submit(asyncio.run, _forget_topics(kafka, namespace)).result()


async def _forget_topics(kafka: str, namespace: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        if names := [name for name in await admin.list_topics() if name.startswith(namespace)]:
            await admin.delete_topics(names)
    finally:
        await admin.close()


class Stack:
    """Everything this run has started, in a folder that goes with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lorafleet-tests-")
        self.home = Path(self._folder.name)
        self.ports = Ports(self.home / "ports.json")
        self._children: list[Child] = []

    def kafka(self) -> Kafka:
        fetch()
        port, controller_port = self.ports.allot("kafka"), self.ports.allot("kafka-controller")
        service = Kafka(self.home / "kafka", port, controller_port, log=self.home / "kafka.log")
        self._children.append(started(service))
        return service

    def store(self) -> Store:
        service = Store(self.home / "store", self.ports.allot, log=self.home / "store.log")
        self._children.append(started(service))
        return service

    def clickhouse(self) -> ClickHouse:
        service = ClickHouse(self.home / "clickhouse", self.ports.allot("clickhouse"), log=self.home / "clickhouse.log")
        self._children.append(started(service))
        return service

    def close(self) -> None:
        for child in reversed(self._children):
            child.stop()
        self._folder.cleanup()
