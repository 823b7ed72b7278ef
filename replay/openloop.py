"""Open-loop load: arrivals at a given rate, whatever the answers do, so that a slow system cannot hide its queue."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import msgspec

LEAST = 60  # requests behind a median worth printing


class Latencies(msgspec.Struct, frozen=True):
    """Milliseconds over `count` answered requests; `failed` were not answered."""

    rate: float
    count: int
    failed: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def summarize(rate: float, milliseconds: list[float], failed: int) -> Latencies:
    """Percentiles by rank. Raises ValueError without a single sample."""
    if not milliseconds:
        raise ValueError(f"none of {failed} requests at {rate:g}/s was answered")
    ranked = sorted(milliseconds)

    def at(share: float) -> float:
        return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 2)

    return Latencies(
        rate, len(ranked), failed, round(statistics.median(ranked), 2), at(0.95), at(0.99), round(ranked[-1], 2)
    )


async def drive(rate: float, seconds: float, request: Callable[[int], Awaitable[float]], seed: int = 0) -> Latencies:
    """Calls `request(i)`, which returns its latency in ms, at Poisson arrivals of `rate` per second for `seconds`."""
    arrivals = random.Random(seed)
    start, due, number = time.perf_counter(), 0.0, 0
    tasks: list[asyncio.Task[float]] = []
    while due < seconds:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.create_task(_timed(request, number), name=f"request {number}"))
        number += 1
        due += arrivals.expovariate(rate)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answered = [r for r in results if isinstance(r, float)]
    return summarize(rate, answered, len(results) - len(answered))


async def _timed(request: Callable[[int], Awaitable[float]], number: int) -> float:
    async with asyncio.timeout(30):
        return await request(number)
