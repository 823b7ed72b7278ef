"""How long until every gateway obeys: a key that is revoked, a limit that is changed, a key that is rotated.

Each change goes through the internal API of the first gateway, which is what `lorafleet customers` asks. All gateways
are asked all the time what they do, each every POLL_S: it obeys from the end of its last answer of the old kind on.
Seconds count from the command's answer, which is what its operator sees (below zero: it was obeyed before that), and
from its asking. A limit that is to be obeyed is max_output_tokens.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import msgspec

from replay.operator import Operator
from replay.stage import Stage
from schemas.reasons import Role

TARGET_S = 2.0
POLL_S = 0.01
LIMIT_S = 30.0
SURE = 5  # answers of the new kind in a row
CUSTOMER, HOUR_S = "keys", 3600

Ask = Callable[[str, str], Awaitable[int]]  # (gateway's URL, key) -> the status of its answer


class Obeyed(msgspec.Struct, frozen=True):
    """One kind of change, over `rounds`; `from_answer_s` and `from_asking_s`: median, worst."""

    change: str
    gateways: int
    rounds: int
    from_answer_s: tuple[float, float]
    from_asking_s: tuple[float, float]
    answer_s: float  # how long the command took, median
    target_s: float

    @property
    def held(self) -> bool:
        return self.from_answer_s[1] <= self.target_s


@dataclass
class Watch:
    """One gateway, asked until it has given SURE answers of the new kind in a row."""

    old: int
    new: int
    changed_at: float | None = None  # the end of the last answer of the old kind
    in_row: int = 0
    asked: int = 0

    def answered(self, status: int, now: float) -> None:
        """Raises RuntimeError for an answer of neither kind."""
        if status not in (self.old, self.new):
            raise RuntimeError(f"a gateway answered {status}, neither {self.old} nor {self.new}")
        self.asked += 1
        if status == self.old:
            self.changed_at, self.in_row = now, 0
        else:
            self.in_row += 1


@dataclass(frozen=True)
class Round:
    answer_s: float
    from_answer_s: float
    from_asking_s: float


@dataclass
class KeyBench:
    """On a running stack with several gateways. One customer, and the operator's hand."""

    stage: Stage
    urls: Sequence[str]
    operator: Operator
    session: aiohttp.ClientSession

    async def run(self, rounds: int, told: Callable[[str], None]) -> list[Obeyed]:
        seen: dict[str, list[Round]] = {}
        for number in range(rounds):
            async for change, round_ in self._round():
                told(f"round {number + 1} of {rounds}: {change}")
                seen.setdefault(change, []).append(round_)
        return [_summed(change, len(self.urls), of) for change, of in seen.items()]

    async def _round(self) -> AsyncIterator[tuple[str, Round]]:
        operator, old = self.operator, await self._key()
        made: dict[str, Any] = {}

        async def add() -> None:
            made.update(await self._key())

        # The secret of a key that is being made is known with the command's answer only: asked for from then on.
        yield "new key works", await self._timed(add, 401, 200, self._models, lambda: made.get("key", "lf-none"))
        yield (
            "rotated: the old one is refused",
            await self._timed(
                lambda: operator.revoke(CUSTOMER, old["hint"]), 200, 401, self._models, lambda: old["key"]
            ),
        )
        key = made["key"]
        for limit, was, becomes in ((1, 200, 400), (0, 400, 200)):
            yield (
                "limit set" if limit else "limit lifted",
                await self._timed(
                    partial(operator.limits, CUSTOMER, max_output_tokens=limit),
                    was, becomes, self._chat, lambda: key,
                ),
            )  # fmt: skip
        yield (
            "revoked",
            await self._timed(lambda: operator.revoke(CUSTOMER, made["hint"]), 200, 401, self._models, lambda: key),
        )

    async def _key(self) -> dict[str, Any]:
        return await self.operator.make_key(CUSTOMER, Role.CUSTOMER, HOUR_S)

    async def _timed(
        self, change: Callable[[], Awaitable[object]], old: int, new: int, ask: Ask, key: Callable[[], str]
    ) -> Round:
        """Raises TimeoutError, RuntimeError, OperatorError."""
        watches = [Watch(old, new) for _ in self.urls]
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            answered = asyncio.Event()
            for url, watch in zip(self.urls, watches, strict=True):
                tasks.create_task(self._watch(url, watch, ask, key, answered), name=f"watch {url}")
            while min(watch.asked for watch in watches) < SURE:  # noqa: ASYNC110 - each has said the old
                await asyncio.sleep(POLL_S)
            asked_at = time.monotonic()
            await change()
            answered_at = time.monotonic()
            answered.set()
        obeyed_at = max(watch.changed_at or asked_at for watch in watches)
        return Round(answered_at - asked_at, obeyed_at - answered_at, obeyed_at - asked_at)

    async def _watch(self, url: str, watch: Watch, ask: Ask, key: Callable[[], str], answered: asyncio.Event) -> None:
        while not answered.is_set() or watch.in_row < SURE:
            watch.answered(await ask(url, key()), time.monotonic())
            await asyncio.sleep(POLL_S)

    async def _models(self, url: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.get(f"{url}/v1/models", headers=headers) as answer:
            return answer.status

    async def _chat(self, url: str, key: str) -> int:
        """Of two tokens, which is one more than the limit that is set."""
        body = {"model": self.stage.model.name, "messages": [{"role": "user", "content": "yes"}], "max_tokens": 2}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def opened(stage: Stage) -> AsyncIterator[KeyBench]:
    async with stage.operator() as operator, aiohttp.ClientSession() as session:
        yield KeyBench(stage, stage.state().gateway_urls, operator, session)


def _summed(change: str, gateways: int, rounds: list[Round]) -> Obeyed:
    def told(seconds: list[float]) -> tuple[float, float]:
        return round(statistics.median(seconds), 3), round(max(seconds), 3)

    return Obeyed(
        change=change,
        gateways=gateways,
        rounds=len(rounds),
        from_answer_s=told([one.from_answer_s for one in rounds]),
        from_asking_s=told([one.from_asking_s for one in rounds]),
        answer_s=round(statistics.median([one.answer_s for one in rounds]), 3),
        target_s=TARGET_S,
    )
