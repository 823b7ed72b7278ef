"""A keeper: gives up on what never starts, restarts what dies, ends what it keeps."""

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from infra.keeper import Keeper
from infra.local.child import Child, ChildError, Spec
from infra.part import Part
from infra.progress import Progress
from infra.state import Phase

LIVES = "import os, time; print('ready', os.environ.get('TAKE_OVER', '0'), flush=True); time.sleep(600)"
FAILS = "import sys; sys.exit('no disk')"


def part(tmp_path: Path, code: str, ready_limit_s: float = 30) -> Part:
    spec = Spec("thing", (sys.executable, "-c", code), log=tmp_path / "log", stop_s=5)
    return Part(
        "thing", lambda: spec, Child.said_ready, again=lambda _: {"TAKE_OVER": "1"}, ready_limit_s=ready_limit_s
    )


def keeper(kept: Part) -> tuple[Keeper, io.StringIO]:
    out = io.StringIO()
    return Keeper(kept, Progress(Console(file=out)), lambda: None), out


async def until_phase(kept: Keeper, phase: Phase, restarts: int) -> None:
    async with asyncio.timeout(20):
        while kept.state().phase is not phase or kept.state().restarts < restarts:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_restarts_what_dies_and_tells_the_next_life(tmp_path: Path) -> None:
    kept, out = keeper(part(tmp_path, LIVES))
    await kept.start()
    first = kept.state()
    assert (first.phase, first.restarts) == (Phase.READY, 0)
    task = asyncio.create_task(kept.keep())
    os.kill(first.pid, signal.SIGKILL)
    await until_phase(kept, Phase.READY, restarts=1)
    second = kept.state()
    assert second.pid not in (0, first.pid)
    assert (tmp_path / "log").read_text().splitlines() == ["ready 0", "ready 1"]
    assert "was killed by signal 9; starts again in 0.2 s" in out.getvalue()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await kept.stop()
    assert kept.state().phase is Phase.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)


async def test_gives_up_on_what_never_starts_with_its_last_words(tmp_path: Path) -> None:
    kept, _ = keeper(part(tmp_path, FAILS))
    with pytest.raises(ChildError, match=r"thing does not start: its last try ended with 1\nno disk\nlog: "):
        await kept.start()
    assert (tmp_path / "log").read_text().count("no disk") == 3


async def test_kills_what_does_not_become_ready(tmp_path: Path) -> None:
    kept, _ = keeper(part(tmp_path, "import time; time.sleep(600)", ready_limit_s=0.2))
    with pytest.raises(ChildError, match="its last try ended with -9"):
        await kept.start()


async def test_stop_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    kept, _ = keeper(part(tmp_path, "import time; time.sleep(600)"))
    task = asyncio.create_task(kept.start())
    await until_phase(kept, Phase.STARTING, restarts=0)
    pid = kept.state().pid
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await kept.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_failed_preparation_is_told(tmp_path: Path) -> None:
    good = part(tmp_path, LIVES)
    before = Spec("fetch", (sys.executable, "-c", FAILS), log=tmp_path / "log")
    kept, _ = keeper(Part(good.name, good.prepare, good.ready, before=(before,)))
    with pytest.raises(ChildError, match="fetch: no disk"):
        await kept.start()
