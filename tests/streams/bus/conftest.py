"""A broker of one's own, to be killed, frozen and brought back."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.child import Child
from infra.local.kafka import Kafka
from streams.bus.settings import KafkaSettings
from tests.stack import Stack, started, wait_until


class Broker:
    def __init__(self, stack: Stack, name: str) -> None:
        ports = stack.ports.allot(name), stack.ports.allot(f"{name}-controller")
        self._service = Kafka(stack.home / name, *ports, log=stack.home / f"{name}.log")
        self.bootstrap = self._service.bootstrap
        self._child: Child | None = None

    def start(self) -> None:
        """Returns before it is ready: that takes some seconds."""
        assert self._child is None
        self._child = Child(self._service.prepare())

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        wait_until(lambda: self._child is None or self._child.returncode() is not None, 10, "the broker's end")
        self._child = None

    def freeze(self) -> None:
        assert self._child is not None
        os.killpg(self._child.pid, signal.SIGSTOP)
        wait_until(self._stopped, 10, "the broker's freezing")

    def _stopped(self) -> bool:
        assert self._child is not None
        return all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for task in Path(f"/proc/{self._child.pid}/task").iterdir()
        )

    def thaw(self) -> None:
        assert self._child is not None
        os.killpg(self._child.pid, signal.SIGCONT)

    def ensure_running(self) -> None:
        if self._child is None:
            self._child = started(self._service)
        self.thaw()
        wait_until(self._service.ready, 60, "the broker")

    def stop(self) -> None:
        if self._child is not None:
            self.kill()


@pytest.fixture(scope="session")
def _own_broker(stack: Stack) -> Iterator[Broker]:
    broker = Broker(stack, "mortal-kafka")
    yield broker
    broker.stop()


@pytest.fixture
def broker(_own_broker: Broker) -> Broker:
    """Running, and left in any state."""
    _own_broker.ensure_running()
    return _own_broker


@pytest.fixture
def settings(kafka: str, namespace: str) -> KafkaSettings:
    """The run's shared broker, with few places."""
    return KafkaSettings(kafka, namespace=namespace, replica_places=4, gateway_places=4)
