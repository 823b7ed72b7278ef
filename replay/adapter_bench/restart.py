"""A gateway and a worker are killed and come back, with however many adapters are registered: how long, how large.

Ready: the gateway answers so; the worker's beat under a new incarnation is live at the gateway. Counted from the start
of the new process, which the supervisor puts off more with each death. Memory is the process' own pages (what would be
free without it) a little after it is ready; the worker's without its engine's, which holds no table.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from statistics import median

import aiohttp
import msgspec
import psutil

from replay.stage import Stage

PARTS = ("gateway-0", "worker-0")
WITHIN_S, LOOK_S, SETTLED_S = 120.0, 0.02, 3.0
TARGET_MB = 100.0


class Restart(msgspec.Struct, frozen=True):
    """Medians over `restarts`, and the quickest and slowest."""

    part: str
    registered: int
    restarts: int
    ready_s: float
    lowest_s: float
    highest_s: float
    own_mb: float
    resident_mb: float


class Growth(msgspec.Struct, frozen=True):
    """What the most registered adapters take more than the fewest."""

    part: str
    registered: int
    ready_s: float
    own_mb: float
    held: bool


async def measure_restarts(stage: Stage, registered: int, restarts: int, told: Callable[[], None]) -> list[Restart]:
    """`told` after each of PARTS' restarts. Raises TimeoutError."""
    found = []
    for part in PARTS:
        ready_s, own_mb, resident_mb = [], [], []
        for _ in range(restarts):
            pid, took_s = await _restarted(stage, part)
            ready_s.append(took_s)
            await asyncio.sleep(SETTLED_S)
            memory = await asyncio.to_thread(psutil.Process(pid).memory_full_info)
            own_mb.append(memory.uss / 1e6)
            resident_mb.append(memory.rss / 1e6)
            told()
        found.append(
            Restart(
                part=part,
                registered=registered,
                restarts=restarts,
                ready_s=round(median(ready_s), 2),
                lowest_s=round(min(ready_s), 2),
                highest_s=round(max(ready_s), 2),
                own_mb=round(median(own_mb), 1),
                resident_mb=round(median(resident_mb), 1),
            )
        )
    return found


def growths(few: list[Restart], many: list[Restart]) -> list[Growth]:
    found = []
    for before, after in zip(few, many, strict=True):
        own_mb = round(after.own_mb - before.own_mb, 1)
        ready_s = round(after.ready_s - before.ready_s, 2)
        found.append(Growth(after.part, after.registered, ready_s, own_mb, own_mb < TARGET_MB))
    return found


async def _restarted(stage: Stage, name: str) -> tuple[int, float]:
    """The new life's process, and the seconds from its start until it was ready."""
    is_ready = _gateway if name.startswith("gateway") else _worker
    (before,) = (part for part in stage.state().parts if part.name == name)
    incarnation = await _incarnation(stage)
    os.kill(before.pid, signal.SIGKILL)
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        (now,) = (part for part in stage.state().parts if part.name == name)
        if now.pid not in (0, before.pid) and await is_ready(stage, incarnation):
            return now.pid, time.time() - now.since_unix_ms / 1e3
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"{name} was not ready again within {WITHIN_S:g} s")


async def _gateway(stage: Stage, _: int) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{stage.url}/readyz") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False


async def _worker(stage: Stage, incarnation: int) -> bool:
    async with stage.operator() as operator:
        (replica,) = await operator.replicas()
    return bool(replica["status"] == "ready" and replica["incarnation"] > incarnation)


async def _incarnation(stage: Stage) -> int:
    async with stage.operator() as operator:
        (replica,) = await operator.replicas()
    return int(replica["incarnation"])
