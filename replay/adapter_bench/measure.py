"""What adapters cost: each step of their way, time to first token by tier, decode while others load, thousands of them.

One stack with one worker on the served base; its own store is the one that the steps are measured with.
"""

from collections.abc import Callable

import msgspec

from replay.adapter_bench.cast import CUSTOMER, Registrations, register_real, register_small
from replay.adapter_bench.decode import PAUSES_S, ROWS, Decode, measure_decode
from replay.adapter_bench.restart import PARTS, Growth, Restart, growths, measure_restarts
from replay.adapter_bench.steps import Step, measure_steps
from replay.adapter_bench.tiers import ADAPTERS, VISITS, Ttft, measure_tiers
from replay.stage import Stage
from streams.adapters.shape import ModelShape

# The brief's base: rank 16 on all of its matrices is 39,976,960 values, 80 MB in 16 bits.
BRIEF = ModelShape(
    layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000, context=4096
)


class Plan(msgspec.Struct, frozen=True):
    """`rounds`: of each step; `turns`: of decoding `tokens`; `restarts`: of each part, with few adapters and many."""

    registered: int
    rounds: int
    turns: int
    tokens: int
    restarts: int


class Result(msgspec.Struct, frozen=True):
    plan: Plan
    steps: list[Step]
    ttft: list[Ttft]
    decode: list[Decode]
    registrations: list[Registrations]
    restarts: list[Restart]
    growth: list[Growth]


async def measure(stage: Stage, plan: Plan, begins: Callable[[str, int], Callable[[], None]]) -> Result:
    """On a running stack whose worker was given `tiers.budgets`. `begins(name, parts)` is told of each
    stage, and gives what to call after each part.
    """
    model, steps = stage.model.name, []
    shapes = {"80 MB": BRIEF, model: ModelShape.of(stage.model)}
    told = begins("steps", len(shapes) * plan.rounds)
    for number, (name, shape) in enumerate(shapes.items()):
        folder = stage.home / f"steps-{number}"
        folder.mkdir()
        steps += await measure_steps(name, shape, stage.environment, folder, plan.rounds, told)
    real, adapters = await register_real(stage, ADAPTERS, begins("adapters", 2 * ADAPTERS))
    async with stage.operator() as operator:
        key = (await operator.make_customer(CUSTOMER)).key
        told = begins("first tokens", VISITS)
        ttft = await measure_tiers(stage.url, key, model, operator, adapters, told)
        told = begins(f"decoding, {ROWS} rows", len(PAUSES_S) * (plan.turns + 1))
        decode = await measure_decode(stage.url, key, operator, adapters, plan.tokens, plan.turns, told)
    few = await measure_restarts(stage, ADAPTERS, plan.restarts, begins("restarts", len(PARTS) * plan.restarts))
    small = await register_small(stage, plan.registered, begins("registrations", plan.registered))
    told = begins("restarts with them", len(PARTS) * plan.restarts)
    many = await measure_restarts(stage, ADAPTERS + plan.registered, plan.restarts, told)
    return Result(plan, steps, ttft, decode, [real, small], [*few, *many], growths(few, many))
