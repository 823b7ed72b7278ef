"""All attacks, in order, and the table of what each got."""

import asyncio
from dataclasses import dataclass

from tests.gateway.attacks import bodies, floods, identities, sockets
from tests.gateway.attacks.target import Attack, Got, Target

ATTACKS = [*identities.ATTACKS, *floods.ATTACKS, *bodies.ATTACKS, *sockets.ATTACKS]
SLOW = floods.SLOW


@dataclass(frozen=True)
class Row:
    """`unharmed`: whether an innocent chat came out right after it."""

    attack: Attack
    got: Got
    unharmed: bool

    @property
    def held(self) -> bool:
        return self.got.held and self.unharmed

    def __str__(self) -> str:
        word = "held" if self.held else "NOT HELD" if self.unharmed else "NOT HELD, others harmed"
        return f"| {self.attack.kind} | {self.attack.name} | {self.got.told} | {word} |"


async def run(target: Target) -> list[Row]:
    """One after the other; those that wait for a limit all at once, at the end."""
    rows = [await _row(target, attack) for attack in ATTACKS]
    return rows + list(await asyncio.gather(*(_row(target, attack) for attack in SLOW)))


def shown(rows: list[Row]) -> str:
    return "\n".join(["| kind | attack | what it got | |", "|---|---|---|---|", *map(str, rows)])


async def _row(target: Target, attack: Attack) -> Row:
    try:
        got = await attack.run(target)
    except Exception as error:
        got = Got(repr(error)[:200], held=False)
    return Row(attack, got, await target.unharmed())
