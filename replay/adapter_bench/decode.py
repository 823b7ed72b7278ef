"""Decode speed of running requests while other adapters are loaded, in turns within one run.

ROWS streams run on adapters in slots. Meanwhile nothing is loaded, or one adapter a second, or one right after the
other, each out of the store through all tiers into a slot that evicts another one. Each turn measures all three.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median

import msgspec

from replay.operator import Operator
from replay.streams import PROMPTS, Script, take_all

ROWS = 4
TARGET = 0.95
LOAD_LIMIT_S = 60
PAUSES_S: dict[str, float | None] = {"none": None, "one a second": 1.0, "one after the other": 0.0}


class Decode(msgspec.Struct, frozen=True):
    """Tokens per second of all rows, median of the turns; `ratio` to the same turn's without loads, and its spread."""

    loads: str
    rows: int
    turns: int
    loads_per_s: float
    tokens_s: float
    ratio: float
    lowest: float
    highest: float
    held: bool


async def measure_decode(
    url: str, key: str, operator: Operator, adapters: list[str], tokens: int, turns: int, told: Callable[[], None]
) -> list[Decode]:
    """The first ROWS adapters run, the others are loaded. `told` after each kind of each turn."""
    scripts = [Script(key, adapter, prompt, tokens) for adapter, prompt in zip(adapters[:ROWS], PROMPTS, strict=False)]
    others = itertools.cycle(adapters[ROWS:])
    for adapter in adapters[:ROWS]:
        await operator.load(0, adapter, LOAD_LIMIT_S)
    rates: dict[str, list[float]] = {kind: [] for kind in PAUSES_S}
    loads: dict[str, list[float]] = {kind: [] for kind in PAUSES_S}
    kinds = list(PAUSES_S)
    for turn in range(-1, turns):  # one to warm up
        for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                loading = group.create_task(_load(operator, others, PAUSES_S[kind], stop), name="loads")
                rate, took_s = await _rate(url, scripts)
                stop.set()  # what is on its way comes before the next turn begins
            if turn >= 0:
                rates[kind].append(rate)
                loads[kind].append(loading.result() / took_s)
            told()
    return [_decode(kind, rates[kind], rates["none"], loads[kind]) for kind in kinds]


async def _load(operator: Operator, adapters: Iterator[str], pause_s: float | None, stop: asyncio.Event) -> int:
    """Until `stop`: how many came."""
    count = 0
    while pause_s is not None and not stop.is_set():
        next_s = time.monotonic() + pause_s
        await operator.load(0, next(adapters), LOAD_LIMIT_S)
        count += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, next_s - time.monotonic())):
                await stop.wait()
    return count


async def _rate(url: str, scripts: list[Script]) -> tuple[float, float]:
    """Tokens per second after each stream's first, and the seconds of all. Raises ValueError if one breaks."""
    began_s = time.monotonic()
    takes = await take_all(url, scripts)
    if broken := [take.error or take.finish for take in takes if not take.whole or len(take.times) < 2]:
        raise ValueError(f"a stream broke: {broken[0]}")
    rate = sum((take.tokens - 1) / (take.times[-1] - take.times[0]) for take in takes)
    return rate, time.monotonic() - began_s


def _decode(kind: str, rates: list[float], quiet: list[float], loads: list[float]) -> Decode:
    ratios = [rate / other for rate, other in zip(rates, quiet, strict=True)]
    ratio = round(median(ratios), 3)
    return Decode(
        loads=kind,
        rows=ROWS,
        turns=len(rates),
        loads_per_s=round(median(loads), 2),
        tokens_s=round(median(rates), 1),
        ratio=ratio,
        lowest=round(min(ratios), 3),
        highest=round(max(ratios), 3),
        held=ratio >= TARGET,
    )
