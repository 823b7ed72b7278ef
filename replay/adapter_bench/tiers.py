"""Time to first token by the tier that the adapter was found in, on a running stack, beside the base's.

The worker's RAM and disk hold fewer adapters than there are (`budgets`). Visited one after the other, all of them are
found in the store; and when as many as the disk holds are visited again and again, on the disk. At each visit the
adapter is then taken out of its slot and asked for again (RAM), and once more (slot). The prompts are equally long and
begin differently, so that the prefix cache helps none; the tier is what `x-adapter-tier` says.
"""

from collections.abc import Callable

import aiohttp
import msgspec
import numpy as np

from replay.operator import Operator
from replay.streams import PROMPTS, Script, Take, take
from streams.adapters.shape import ModelShape
from workers.slot_image import Precision, image_bytes

TIERS = ("none", "gpu", "ram", "disk", "remote")
SLOTS, IN_RAM, ON_DISK, ADAPTERS = 8, 6, 14, 20
TOKENS = 4  # the first piece of text may take more than one
_ON_DISK_AGAIN = ON_DISK - 2  # of these each is found in the store once, then on the disk
VISITS = ADAPTERS + 3 * _ON_DISK_AGAIN
RANK = 16


class Ttft(msgspec.Struct, frozen=True):
    """Seen by the client. `added_ms`: p50 above that of an adapter in a slot."""

    tier: str
    requests: int
    p50_ms: float
    p95_ms: float
    highest_ms: float
    added_ms: float


def budgets(shape: ModelShape) -> dict[str, str]:
    """The worker's settings: so many adapters in slots, in RAM and on the disk. It brings none ahead of requests."""
    size = image_bytes(shape, RANK, Precision.BF16)
    return {
        "WORKER_SLOTS": str(SLOTS),
        "WORKER_RAM_BYTES": str(IN_RAM * size + size // 2),
        "WORKER_DISK_BYTES": str(ON_DISK * size + size // 2),
        "WORKER_PULL_BYTES_PER_S": "0",
    }


async def measure_tiers(
    url: str, key: str, base: str, operator: Operator, adapters: list[str], told: Callable[[], None]
) -> list[Ttft]:
    """`adapters`: ADAPTERS of them. `told` after each of VISITS. Raises ValueError if a chat or a tier fails."""
    seen: dict[str, list[float]] = {tier: [] for tier in TIERS}
    asked = 0

    async def ask(session: aiohttp.ClientSession, model: str) -> None:
        nonlocal asked
        asked += 1
        found: Take = await take(session, url, Script(key, model, f"{asked:06d}: {PROMPTS[0]}", TOKENS))
        if not found.whole or not found.times:
            raise ValueError(f"{model}: {found.error or 'it said nothing'}")
        seen[found.tier].append(found.ttft_ms)

    async with aiohttp.ClientSession() as session:
        for adapter in [*adapters, *adapters[:_ON_DISK_AGAIN] * 3]:
            await ask(session, adapter)
            await operator.unload(0, adapter)
            await ask(session, adapter)
            await ask(session, adapter)
            await ask(session, base)
            told()
    if missing := [tier for tier, times in seen.items() if not times]:
        raise ValueError(f"no adapter was found in: {', '.join(missing)}")
    slot = float(np.median(seen["gpu"]))
    return [_ttft(tier, times, slot) for tier, times in seen.items()]


def _ttft(tier: str, times: list[float], slot: float) -> Ttft:
    p50, p95 = (round(float(value), 1) for value in np.percentile(times, (50, 95)))
    return Ttft(tier, len(times), p50, p95, round(max(times), 1), round(p50 - slot, 1))
