"""Versions that are registered, deployed, rolled back and retired at random, while others chat.

One change at a time for each name; several names at once. A change whose answer is not known (its gateway could not
tell) is looked up afterwards: until then both outcomes are right.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from replay.churn.cast import Cast
from replay.churn.truth import Truth
from replay.operator import Operator, OperatorError

T = TypeVar("T")
CUSTOMER = "churn"
KNOWN = (404, 409, 422, 504)  # refusals after which an alias stands as it stood
SETTLED_WITHIN_S = 60.0


class Changes:
    """`operators`: by way of each gateway. `done` counts what was changed, and what was refused."""

    def __init__(self, operators: Sequence[Operator], cast: Cast, truth: Truth, names: int, seed: int) -> None:
        self._operators, self._cast, self._truth = operators, cast, truth
        self._draw = random.Random(seed)
        self._names = [f"{CUSTOMER}/bot-{number}" for number in range(names)]
        self._versions: dict[str, list[str]] = {name: [] for name in self._names}
        self._fresh = 0  # voices that were given out
        self.done: Counter[str] = Counter()
        self.registered: set[str] = set()

    @property
    def aliases(self) -> list[str]:
        return [alias_of(name) for name in self._names]

    @property
    def versions(self) -> list[str]:
        """Those that nobody has begun to retire."""
        return [v for versions in self._versions.values() for v in versions if v not in self._truth.retired]

    async def begin(self, each: int) -> None:
        """`each` versions of every name; the aliases at the first ones."""
        for name in self._names:
            for _ in range(each):
                await self._register(name)
            first = self._versions[name][0]
            self._truth.begins(alias_of(name), first, time.monotonic())
            await self._operator.set_alias(alias_of(name), first)

    async def go_on(self, ended: asyncio.Event) -> None:
        """One change after the other until the end."""
        mine = list(self._names)
        while not ended.is_set():
            name = self._draw.choice(mine)
            if name not in self._names:
                continue
            self._names.remove(name)  # ours for the moment
            try:
                await self._change(name)
            finally:
                self._names.append(name)
            await asyncio.sleep(self._draw.uniform(0, 0.3))

    async def _change(self, name: str) -> None:
        match self._draw.choices(("new", "old", "back", "retire"), (3, 3, 3, 2))[0]:
            case "new":
                await self._move(name, await self._register(name))
            case "old":
                await self._move(name, self._draw.choice([v for v in self._versions[name] if v in self.versions]))
            case "back":
                await self._back(name)
            case _:
                await self._retire(name)

    async def _register(self, name: str) -> str:
        version = f"{name}@{len(self._versions[name]) + 1}"
        voice = self._fresh % len(self._cast.commands)
        self._fresh += 1
        self._truth.voices[version] = voice
        body = self._cast.registration(voice, version)
        await self._answered(lambda operator: operator.register_as(body))
        self._versions[name].append(version)
        self.registered.add(version)
        self.done["registered"] += 1
        return version

    async def _move(self, name: str, version: str) -> None:
        alias = alias_of(name)
        if version in self._truth.ends(alias):
            return
        self._truth.begins(alias, version, time.monotonic())
        try:
            await self._operator.set_alias(alias, version)
            self._truth.settled(alias, version, time.monotonic())
            self.done["deployed"] += 1
        except (OperatorError, aiohttp.ClientError, TimeoutError) as error:
            await self._look(alias, error)

    async def _back(self, name: str) -> None:
        alias = alias_of(name)
        previous = (await self._row(alias))["previous_adapter_id"]
        if not previous:
            return
        self._truth.begins(alias, previous, time.monotonic())
        try:
            await self._operator.rollback(alias)
            self._truth.settled(alias, previous, time.monotonic())
            self.done["rolled back"] += 1
        except (OperatorError, aiohttp.ClientError, TimeoutError) as error:
            await self._look(alias, error)

    async def _retire(self, name: str) -> None:
        idle = [v for v in self._versions[name] if v in self.versions and v not in self._truth.ends(alias_of(name))]
        if not idle:
            return
        version = self._draw.choice(idle)
        called = time.monotonic()
        self._truth.retired[version] = (called, float("inf"))
        await self._answered(lambda operator: operator.retire(version))
        self._truth.retired[version] = (called, time.monotonic())
        self.done["retired"] += 1

    async def _look(self, alias: str, error: Exception) -> None:
        """Where the alias stands after a change that was refused, or whose answer never came."""
        known = isinstance(error, OperatorError) and error.status in KNOWN
        self.done["refused or too late" if known else "answer unknown"] += 1
        row = await self._row(alias)
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while row["pending"] is not None:
                await asyncio.sleep(0.2)
                row = await self._row(alias)
        self._truth.settled(alias, row["adapter_id"], time.monotonic())

    async def _row(self, alias: str) -> dict[str, Any]:
        return await self._answered(lambda operator: operator.alias(alias))

    async def _answered(self, ask: Callable[[Operator], Awaitable[T]]) -> T:
        """Asked until there is an answer: what is asked may be asked twice. Raises OperatorError for a refusal."""
        while True:
            try:
                return await ask(self._operator)
            except (OperatorError, aiohttp.ClientError, TimeoutError) as error:
                if isinstance(error, OperatorError) and error.status < 500:
                    raise
                self.done["asked again"] += 1
                await asyncio.sleep(0.5)

    @property
    def _operator(self) -> Operator:
        return self._draw.choice(self._operators)


def alias_of(name: str) -> str:
    return f"{name}:prod"
