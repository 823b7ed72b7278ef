"""Open-loop load: arrivals at a given rate, whatever the answers do, so that a slow system cannot hide its queue."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

LEAST = 60  # requests behind a median worth printing

Request = Callable[[int], Awaitable[float]]  # number -> its latency in ms


class Latencies(msgspec.Struct, frozen=True):
    """Milliseconds over `count` answered requests; `failed` were not answered."""

    rate: float
    count: int
    failed: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass
class Samples:
    """Of one subject at one rate, gathered over several drives."""

    rate: float
    milliseconds: list[float] = field(default_factory=list)
    failed: int = 0

    def latencies(self) -> Latencies:
        """Percentiles by rank. Raises ValueError without a single sample."""
        if not self.milliseconds:
            raise ValueError(f"none of {self.failed} requests at {self.rate:g}/s was answered")
        ranked = sorted(self.milliseconds)

        def at(share: float) -> float:
            return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 2)

        median = round(statistics.median(ranked), 2)
        return Latencies(self.rate, len(ranked), self.failed, median, at(0.95), at(0.99), round(ranked[-1], 2))

    async def drive(self, seconds: float, request: Request, seed: int = 0) -> None:
        """Calls `request(i)` at Poisson arrivals for `seconds`."""
        arrivals = random.Random(seed)
        start, due, number = time.perf_counter(), 0.0, 0
        tasks: list[asyncio.Task[float]] = []
        while due < seconds:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(asyncio.create_task(_timed(request, number), name=f"request {number}"))
            number += 1
            due += arrivals.expovariate(self.rate)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, float):
                self.milliseconds.append(result)
            else:
                self.failed += 1


async def _timed(request: Request, number: int) -> float:
    async with asyncio.timeout(30):
        return await request(number)
