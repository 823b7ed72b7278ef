"""A yardstick's process beside the stack: started, awaited until it says `ready URL KEY`, ended with its scene."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

READY_S = 60


@dataclass(frozen=True)
class Beside:
    """Where its door is, if it has one; its process."""

    url: str
    key: str
    pid: int


@asynccontextmanager
async def beside(environment: dict[str, str], *module: str) -> AsyncIterator[Beside]:
    """Runs `python -m module` with `environment` laid over this process' own. Raises RuntimeError if it does not start.

    Its stdin stays open for as long as this process lives, for those that watch it: this one may be killed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *module,
        env=os.environ | environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), READY_S)).decode().split()
        if line[:1] != ["ready"]:
            raise RuntimeError(f"{module[0]} did not start")
        yield Beside(line[1], line[2], process.pid)
    finally:
        process.kill()
        await process.wait()


def end_with_stdin() -> None:
    """For a daemon thread of such a process: ends it with the one that started it."""
    sys.stdin.read()
    os._exit(0)
