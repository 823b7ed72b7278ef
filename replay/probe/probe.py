"""One round after the other: every live replica is asked for every canary, and what is wrong twice has consequences.

Owns nothing that must survive: a probe that dies is started again and asks anew. Several probes do not disturb each
other: a drain or a quarantine that comes twice is harmless. It acts first, for customers are being served; then it
writes of each wrong answer one ERROR line and one event (`cache-events`, event "wrong").
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from itertools import chain
from typing import Self

import aiohttp
import msgspec

from replay.operator import Operator, OperatorError
from replay.probe.attempts import Attempts
from replay.probe.golden import CUSTOMER, Golden
from replay.probe.question import Heard, KeyRefused, Question, ask
from replay.probe.verdict import Result, Verdict, judge
from schemas.reasons import Role, Tier
from schemas.stats import CacheEvent
from schemas.topics import CACHE_EVENTS
from streams.bus.errors import BusUnavailable
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

log = logging.getLogger("probe")

KEY_S = 86_400
SEND_LIMIT_S = 5.0
SHOWN = 80  # characters of a wrong answer: it may be out of another customer's weights
WHY = "it gives wrong answers on every replica: the operator has been told"  # what its customer may read


class Miss(msgspec.Struct, frozen=True):
    """A wrong answer, the second to the same question. slot and epoch are the worker's word, -1 where none came."""

    at_unix_ms: int
    replica: int
    incarnation: int
    adapter_id: str
    content_id: str
    slot: int
    epoch: int
    request_id: str
    expected: str
    got: str


class Unasked(msgspec.Struct, frozen=True):
    replica: int
    adapter_id: str
    why: str


class Round(msgspec.Struct, frozen=True):
    """`wrong_total`, `unasked_total`: since the probe's start. `failed`: what should have been done, and was not."""

    at_unix_ms: int
    took_ms: int
    replicas: list[int]
    right: int
    wrong: list[Miss]
    unasked: list[Unasked]
    drained: list[int]
    quarantined: list[str]
    told: str
    failed: str
    wrong_total: int
    unasked_total: int
    again: bool


class Probe:
    """`async with Probe(url, operator, kafka, goldens) as probe`. `operator` speaks to the internal port."""

    def __init__(self, url: str, operator: Operator, kafka: KafkaSettings, goldens: Sequence[Golden]) -> None:
        self._url, self._operator, self._goldens = url, operator, goldens
        self._attempts, self._writer = Attempts(kafka), Writer(kafka, "probe")
        self._key = self._hint = ""
        self._rounds = self._wrong = self._unasked = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            await self._renew()
            await self._writer.start()
            await self._attempts.__aenter__()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._attempts.__aexit__()
        await self._writer.stop()
        await self._session.close()
        try:
            await self._operator.revoke(CUSTOMER, self._hint)
        except (OperatorError, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("the probe's key was not revoked, and ends within a day: %s", error)

    async def round(self) -> Round:
        """Never raises for what the fleet does."""
        began, at = time.monotonic(), time.time_ns() // 1_000_000
        try:
            replicas = [int(r["replica_id"]) for r in await self._operator.replicas() if r["status"] == "ready"]
            heard = await self._asked(replicas)
            problem = "" if replicas else "no replica is ready"
        except (OperatorError, KeyRefused, aiohttp.ClientError, OSError, TimeoutError) as error:
            replicas, heard, problem = [], [], f"{type(error).__name__}: {error}"
        self._rounds += 1
        verdict = judge({(one.question.replica, one.question.golden.adapter_id): _result(one) for one in heard})
        failed = await self._act(verdict)
        misses = [await self._miss(one) for one in heard if one.wrong]
        failed += await self._tell(misses, verdict)
        unasked = [
            Unasked(one.question.replica, one.question.golden.adapter_id, one.why_not) for one in heard if one.why_not
        ] + ([Unasked(-1, "", problem)] if problem else [])
        self._wrong, self._unasked = self._wrong + len(misses), self._unasked + len(unasked)
        return Round(
            at_unix_ms=at,
            took_ms=round((time.monotonic() - began) * 1000),
            replicas=replicas,
            right=sum(one.right for one in heard),
            wrong=misses,
            unasked=unasked,
            drained=list(verdict.drain),
            quarantined=list(verdict.quarantine),
            told=verdict.told,
            failed="; ".join(failed),
            wrong_total=self._wrong,
            unasked_total=self._unasked,
            again=verdict.again or bool(failed),
        )

    async def _asked(self, replicas: Sequence[int]) -> list[Heard]:
        """All replicas side by side, each one question after the other."""
        try:
            return list(chain(*await asyncio.gather(*(self._of(replica) for replica in replicas))))
        except KeyRefused:
            await self._renew()
            return list(chain(*await asyncio.gather(*(self._of(replica) for replica in replicas))))

    async def _of(self, replica: int) -> list[Heard]:
        return [await self._twice(Question(replica, golden, self._prompt(golden))) for golden in self._goldens]

    async def _twice(self, question: Question) -> Heard:
        """A wrong answer counts only if the same question, asked again at once, is answered wrongly too."""
        first = await ask(self._session, self._url, self._key, question)
        return await ask(self._session, self._url, self._key, question) if first.wrong else first

    def _prompt(self, golden: Golden) -> str:
        """Another one each round, so that no answer comes out of the prefix cache."""
        prompts = list(golden.answers)
        return prompts[self._rounds % len(prompts)]

    async def _miss(self, heard: Heard) -> Miss:
        row, question = await self._attempts.row(heard.request_id), heard.question
        return Miss(
            at_unix_ms=time.time_ns() // 1_000_000,
            replica=question.replica,
            incarnation=-1 if row is None else row.incarnation,
            adapter_id=question.golden.adapter_id,
            content_id=question.golden.content_id,
            slot=-1 if row is None else row.slot,
            epoch=-1 if row is None else row.epoch,
            request_id=heard.request_id,
            expected=f"{question.expected} ({question.golden.finish})",
            got=f"{heard.got[0][:SHOWN]} ({heard.got[1]})",
        )

    async def _act(self, verdict: Verdict) -> list[str]:
        """What could not be done, and why."""
        failed: list[str] = []
        for replica in verdict.drain:
            failed += await self._done(self._operator.drain(replica, self._key), f"drain replica {replica}")
        for adapter in verdict.quarantine:
            failed += await self._done(self._operator.quarantine(adapter, WHY, self._key), f"quarantine {adapter}")
        return failed

    async def _tell(self, misses: Sequence[Miss], verdict: Verdict) -> list[str]:
        """Likewise."""
        failed: list[str] = []
        done = [f"replica {replica} is drained" for replica in verdict.drain]
        done += [f"{adapter} is quarantined" for adapter in verdict.quarantine]
        for miss in misses:
            log.error("wrong answer: %s: %s", msgspec.json.encode(miss).decode(), "; ".join(done) or verdict.told)
            failed += await self._done(self._event(miss), "write the event")
        return failed

    async def _event(self, miss: Miss) -> None:
        event = CacheEvent(
            miss.at_unix_ms, miss.replica, miss.incarnation, miss.adapter_id, miss.content_id, "wrong", Tier.GPU,
            Tier.NONE, 0, 0.0,
            f"slot {miss.slot} epoch {miss.epoch}: {miss.got!r} is not {miss.expected!r}, request {miss.request_id}",
        )  # fmt: skip
        await self._writer.send(CACHE_EVENTS, event, key=str(miss.replica), timeout_s=SEND_LIMIT_S)

    @staticmethod
    async def _done(doing: Awaitable[object], what: str) -> list[str]:
        try:
            await doing
        except (OperatorError, BusUnavailable, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.error("not done: %s: %s", what, error)
            return [f"{what}: {error}"]
        return []

    async def _renew(self) -> None:
        """A key of the canary customer with which one replica may be named: an operator's, and good for a day."""
        made = await self._operator.make_key(CUSTOMER, Role.OPERATOR, KEY_S)
        self._key, self._hint = str(made["key"]), str(made["hint"])


def _result(heard: Heard) -> Result:
    return Result.UNASKED if heard.why_not else Result.RIGHT if heard.right else Result.WRONG
