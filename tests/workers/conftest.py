"""A rig per test, on the run's broker."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.rig import Rig


@pytest.fixture
async def rig(kafka: str, namespace: str, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(kafka, namespace, tmp_path)
    await rig.start()
    yield rig
    await rig.stop()
