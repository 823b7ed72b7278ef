"""kill -9 under running streams: what the clients saw, and how long until the stack was whole again.

Each round starts streams whose right answers are known from an undisturbed run, kills one process at a random moment of
theirs, lets them end, and compares. The supervisor starts the process again; the next round waits for that.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import aiohttp
import msgspec
import psutil

from infra.state import Phase
from replay.stage import Stage
from replay.streams import Script, Take, take_all

PARTS = ("worker", "engine", "hung-engine", "gateway", "kafka", "control", "sink", "store", "clickhouse")
HEALED_WITHIN_S = 120.0


class Round(msgspec.Struct, frozen=True):
    """`same`: streams whose tokens are those of the undisturbed run; the others say why in `errors`."""

    part: str
    streams: int
    same: int
    redrives: int
    longest_pause_s: float
    healed_s: float
    errors: list[str]


class Kills(msgspec.Struct, frozen=True):
    """All rounds of one part. `different`: ended as if whole, with other tokens. Must be 0, always."""

    part: str
    rounds: int
    streams: int
    whole: int
    different: int
    broken: int
    redrives: int
    pause_p50_s: float
    pause_max_s: float
    healed_p50_s: float
    healed_max_s: float
    errors: list[str]


async def run(
    stage: Stage, part: str, rounds: int, scripts: list[Script], seed: int, told: Callable[[int, Round], None]
) -> Kills:
    """Raises ValueError when the undisturbed run is not whole or not as long as asked."""
    right = await take_all(stage.url, scripts)
    for reference in right:
        if not reference.whole or reference.tokens < reference.script.max_tokens:
            raise ValueError(f"undisturbed {reference.script.model}: {reference.tokens} tokens {reference.error}")
    took = max(reference.times[-1] - reference.asked_at for reference in right)
    chance = random.Random(seed)
    done: list[Round] = []
    different = 0
    for number in range(rounds):
        one, takes = await _round(stage, part, scripts, right, chance.uniform(0.1, 0.6) * took)
        different += sum(t.whole and not t.same_as(r) for t, r in zip(takes, right, strict=True))
        done.append(one)
        told(number + 1, one)
    pauses, healed = sorted(r.longest_pause_s for r in done), sorted(r.healed_s for r in done)
    streams = len(scripts) * rounds
    whole = sum(r.same for r in done)
    return Kills(
        part, rounds, streams, whole, different, streams - whole - different, sum(r.redrives for r in done),
        round(median(pauses), 2), pauses[-1], round(median(healed), 2), healed[-1],
        sorted({error for r in done for error in r.errors}),
    )  # fmt: skip


async def _round(
    stage: Stage, part: str, scripts: list[Script], right: list[Take], kill_after_s: float
) -> tuple[Round, list[Take]]:
    before = await redrives(stage)
    streaming = asyncio.create_task(take_all(stage.url, scripts), name="streams")
    await asyncio.sleep(kill_after_s)
    killed_at = time.monotonic()
    name, restarts = await kill(stage, part)
    healing = asyncio.create_task(healed(stage, name, restarts), name="healing")
    takes = await streaming
    healed_s = await healing - killed_at
    errors = [t.error for t in takes if t.error]
    return Round(
        part=name,
        streams=len(takes),
        same=sum(t.whole and t.same_as(r) for t, r in zip(takes, right, strict=True)),
        redrives=max(0, await redrives(stage) - before) if part != "gateway" else 0,
        longest_pause_s=round(max(t.longest_pause_s for t in takes), 2),
        healed_s=round(healed_s, 2),
        errors=errors,
    ), takes


async def kill(stage: Stage, part: str) -> tuple[str, int]:
    """Kills (or stops) the part, of several workers the busiest. Returns its name and its restarts so far."""
    of_worker = part in ("worker", "engine", "hung-engine")
    name = f"worker-{await _busiest(stage)}" if of_worker else "gateway-0" if part == "gateway" else part
    [state] = [p for p in stage.state().parts if p.name == name]
    pid = state.pid
    if of_worker and part != "worker":
        [pid] = [c.pid for c in psutil.Process(pid).children(True) if "workers.engine" in " ".join(c.cmdline())]
    os.kill(pid, signal.SIGSTOP if part == "hung-engine" else signal.SIGKILL)
    return name, state.restarts


async def _busiest(stage: Stage) -> int:
    async with stage.operator() as operator:
        replicas = await operator.replicas()
    return busiest(replicas)


def busiest(replicas: list[dict[str, Any]]) -> int:
    """The place of the replica with the most tokens in flight, as the internal API tells of them."""
    return int(max(replicas, key=lambda replica: replica["tokens_in_flight"])["replica_id"])


async def healed(stage: Stage, name: str, restarts: int) -> float:
    """When the part runs again and the gateway takes chats with as many replicas as there should be."""
    end = time.monotonic() + HEALED_WITHIN_S
    while time.monotonic() < end:
        parts = {part.name: part for part in stage.state().parts}
        again = parts[name].restarts > restarts and parts[name].phase is Phase.READY
        if again and await _serves(stage, sum(part.startswith("worker-") for part in parts)):
            return time.monotonic()
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{name} was not whole again within {HEALED_WITHIN_S:g} s")


async def _serves(stage: Stage, workers: int) -> bool:
    try:
        return await metric(stage, "ready") == 1 and await metric(stage, "live_replicas") >= workers
    except (aiohttp.ClientError, OSError):
        return False


async def redrives(stage: Stage) -> int:
    """As the gateway counts them, since its start."""
    return int(await metric(stage, "redrives_total"))


async def metric(stage: Stage, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{stage.internal_url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith(f"lorafleet_gateway_{name} "):
                return float(line.split()[1])
    raise KeyError(name)
