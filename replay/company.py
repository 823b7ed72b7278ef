"""Does an adapter say the same alone and in company? Eight adapters, each alone, then all at once, greedily."""

import asyncio
import tempfile
from pathlib import Path

import msgspec

from replay.peft_adapters import write_random
from replay.stage import Stage
from replay.streams import PROMPTS, Script, Take, take_all
from streams.adapters.shape import ModelShape

CUSTOMER = "company"


class Company(msgspec.Struct, frozen=True):
    """`same`: how many of `adapters` said the same tokens alone and together. `different_texts`: sanity, all differ.

    `most_in_step`: adapters in one engine step; `mixed_steps`: steps with two or more.
    """

    adapters: int
    tokens_each: int
    same: int
    different_texts: int
    mixed_steps: int
    most_in_step: int


async def cast(stage: Stage, adapters: int, tokens: int) -> list[Script]:
    """Registers `adapters` strong random adapters of one customer; a script for each, all with the same prompt."""
    shape = await asyncio.to_thread(ModelShape.of, stage.model)
    async with stage.operator() as operator:
        tenant = await operator.make_customer(CUSTOMER)
        scripts = []
        for number in range(adapters):
            adapter_id = f"{CUSTOMER}/voice-{number}@1"
            with tempfile.TemporaryDirectory() as folder:
                await asyncio.to_thread(write_random, Path(folder), shape, 1000 + number)
                await operator.register(await stage.upload(Path(folder), adapter_id))
            scripts.append(Script(tenant.key, adapter_id, PROMPTS[0], tokens))
    return scripts


async def steps(stage: Stage) -> tuple[int, int]:
    """(steps with two or more adapters, most adapters in one step) over all replicas, as their beats say."""
    await asyncio.sleep(1.5)  # a beat
    async with stage.operator() as operator:
        replicas = await operator.replicas()
    return (
        sum(replica["mixed_steps"] for replica in replicas),
        max((replica["max_adapters_in_step"] for replica in replicas), default=0),
    )


async def measure(stage: Stage, adapters: int = 8, tokens: int = 48) -> Company:
    """On a running stack."""
    scripts = await cast(stage, adapters, tokens)
    alone: list[Take] = []
    for script in scripts:
        alone += await take_all(stage.url, [script])
    before, _ = await steps(stage)
    together = await take_all(stage.url, scripts)
    after, most = await steps(stage)
    return Company(
        adapters=adapters,
        tokens_each=tokens,
        same=sum(a.whole and b.whole and a.same_as(b) for a, b in zip(alone, together, strict=True)),
        different_texts=len({a.text for a in alone}),
        mixed_steps=after - before,
        most_in_step=most,
    )
