"""Every attack of the table, against a gateway that is short with slow clients."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.attacks import table
from tests.gateway.attacks.target import Target
from tests.gateway.rig import Rig
from tests.stack import Stack


@pytest.mark.real
@pytest.mark.timeout(400)
async def test_each_attack_is_held(kafka: str, namespace: str, model: Path, tmp_path: Path, stack: Stack) -> None:
    rig = Rig(kafka, namespace, model, tmp_path)
    try:
        await asyncio.to_thread(rig.prepare)
        public, internal = stack.ports.allot("attacked"), stack.ports.allot("attacked-internal")
        door = rig.gateway(public, internal, module="tests.gateway.hasty_gateway")
        await asyncio.to_thread(rig.ready, door.child, rig.worker(WORKER_STEP_MS="2"))
        await asyncio.to_thread(door.sees, 1)
        target = Target(rig, door)
        await target.prepare()
        rows = await table.run(target)
    finally:
        rig.stop()
    assert [str(row) for row in rows if not row.held] == []
