"""A rig per test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.loader.rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.close()
