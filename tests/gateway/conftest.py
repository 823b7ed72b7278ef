"""One gateway and one worker for all tests that leave both as they were; those that kill start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.desk import Desk
from tests.gateway.rig import Door, Rig
from tests.stack import Stack, own_namespace


@pytest.fixture(scope="session")
def fleet(kafka: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with own_namespace(kafka) as namespace:
        rig = Rig(kafka, namespace, model, tmp_path_factory.mktemp("fleet"))
        rig.prepare()
        yield rig
        rig.stop()


@pytest.fixture
def rig(kafka: str, namespace: str, model: Path, tmp_path: Path) -> Iterator[Rig]:
    """A fleet of this test's own, still without processes."""
    rig = Rig(kafka, namespace, model, tmp_path)
    rig.prepare()
    yield rig
    rig.stop()


@pytest.fixture(scope="session")
def door(fleet: Rig, stack: Stack) -> Door:
    """The gateway of `fleet`, with a replica that takes 5 ms a step."""
    door = fleet.gateway(stack.ports.allot("fleet-public"), stack.ports.allot("fleet-internal"))
    fleet.ready(door.child, fleet.worker(WORKER_STEP_MS="5"))
    door.sees(1)
    return door


@pytest.fixture
def desk() -> Desk:
    return Desk()
