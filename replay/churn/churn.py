"""The whole of it: chats through every gateway, changes and kills at once; then what is left, and what was lost."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from replay.churn.cast import rehearse
from replay.churn.changes import CUSTOMER, Changes
from replay.churn.chatting import Chatting
from replay.churn.leaks import Leaks, look
from replay.churn.truth import Truth
from replay.kills import healed, kill
from replay.operator import Operator
from replay.stage import Stage

EACH = 3  # versions of a name at the beginning
CHANGERS, CHATTERS = 3, 12
KILL_EVERY_S = (6.0, 18.0)


class Plan(msgspec.Struct, frozen=True):
    """`adapters` at the beginning, of which more come and some go; `spare`: voices for those that come."""

    requests: int = 2000
    adapters: int = 60
    spare: int = 30
    tokens: int = 12
    seed: int = 0


class Churn(msgspec.Struct, frozen=True):
    """`ended` counts the chats by how they ended, `changes` what was changed; `wrong` tells each chat that is."""

    requests: int
    right: int
    ended: dict[str, int]
    asked_again: int
    tiers: dict[str, int]
    changes: dict[str, int]
    kills: int
    registered: int
    lost_registrations: list[str]
    leaks: Leaks
    wrong: list[str]

    @property
    def held(self) -> bool:
        return not self.wrong and not self.lost_registrations and self.leaks.none


async def measure(doors: Sequence[Stage], plan: Plan, told: Callable[[str], None]) -> Churn:
    """On a running stack, through each of its gateways. Raises ValueError where the voices cannot be told apart."""
    truth, stage = Truth(), doors[0]
    async with AsyncExitStack() as opened:
        operators = [await opened.enter_async_context(door.operator()) for door in doors]
        voices = plan.adapters + plan.spare
        cast = await rehearse(
            stage, operators[0], voices, plan.tokens, lambda done, of: told(f"voices: {done} of {of}")
        )
        tenant = await operators[0].make_customer(CUSTOMER)
        changes = Changes(operators, cast, truth, plan.adapters // EACH, plan.seed)
        told("versions and aliases")
        await changes.begin(EACH)
        chatting = Chatting([door.url for door in doors], tenant, cast, truth, changes, plan.tokens, plan.seed)
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CHANGERS):
                group.create_task(changes.go_on(ended), name="changes")
            killing = group.create_task(_kill(stage, ended, plan.seed), name="kills")
            await chatting.go_on(
                plan.requests,
                CHATTERS,
                lambda done: told(f"chats: {done} of {plan.requests}, {len(chatting.wrong)} wrong"),
            )
            ended.set()
        told("what is left")
        leaks = await look(stage, operators[0])
        lost = [lost for operator in operators for lost in await _lost(operator, changes, truth)]
    return Churn(
        requests=plan.requests,
        right=chatting.seen["right"],
        ended=dict(chatting.seen),
        asked_again=chatting.again,
        tiers=dict(chatting.tiers),
        changes=dict(changes.done),
        kills=killing.result(),
        registered=len(changes.registered),
        lost_registrations=lost,
        leaks=leaks,
        wrong=chatting.wrong,
    )


async def _kill(stage: Stage, ended: asyncio.Event, seed: int) -> int:
    """kill -9 of the busiest worker, again and again, once the last one is back. How many."""
    draw, kills = random.Random(seed), 0
    while not ended.is_set():
        try:
            await asyncio.wait_for(ended.wait(), draw.uniform(*KILL_EVERY_S))
        except TimeoutError:
            await healed(stage, *await kill(stage, "worker"))
            kills += 1
    return kills


async def _lost(operator: Operator, changes: Changes, truth: Truth) -> list[str]:
    """Registrations that were answered, and are not what they were answered to be."""
    rows = {row["adapter_id"]: row["status"] for row in await operator.adapters()}
    wanted = {version: "retired" if version in truth.retired else "ready" for version in changes.registered}
    return [f"{v}: {rows.get(v)}, not {status}" for v, status in wanted.items() if rows.get(v) != status]
