"""How much one gateway process carries on one core, beside a bare aiohttp server that streams the same chunks there.

The gateway is the real one, behind the real broker, alone on its core; the replicas are replay/paced_replicas.py, as
many and as fast as the brief's; they, the broker, the client and the rest share the other cores, and how much of these
each took is told, for there they may be what is slow. Both servers have the same client (replay/rawstreams.py), are on
the same core and stream in turns. A token's age is from its making at the replica to its coming at the client: of every
token but a stream's first, of which the time from the request counts.

Order: cold starts with few rows and with many; memory, before any load has grown the heap; the peak; then a higher rate
each time, until the 99th percentile of ages is beyond the last of BOUNDS_MS.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import psutil

from gateway.base_model import BaseModel
from infra.local.child import Child
from infra.local.ports import pick
from infra.processes import gateway as gateway_part
from replay import crowd
from replay.beside import Beside, beside
from replay.cores import Shares, pin, pss_bytes
from replay.openloop import Latencies, Samples
from replay.rawstreams import Body, RawStreams, Shape
from replay.stage import Stage
from replay.stamps import Stamps
from streams.adapters.base_model import base_hash

BOUNDS_MS = (10.0, 50.0)
FEW = 10
PROMPT_WORDS = 720  # 750 tokens with what the template puts around them
PROMPTS = 64  # different ones
SLOW = 100  # steps per token while memory is looked at: nothing but the open streams is to matter
SPARE_PLACE = 1  # of the gateways whose start is timed
SETTLE_S = 2.0


@dataclass(frozen=True)
class Plan:
    """The brief's peak: 40 requests/s with 250 tokens of output each, 26 replicas, 50 ms a token, 5,000 customers."""

    rate: float = 40.0
    tokens: int = 250
    replicas: int = 26
    step_ms: float = 50.0
    customers: int = 5000
    streams: int = 1000  # open while memory is looked at
    factors: Sequence[float] = (1.25, 1.5, 2.0, 3.0)
    seconds: float = 12.0
    warm_s: float = 5.0
    starts: int = 3

    def shape(self, factor: float = 1.0) -> Shape:
        return Shape(self.rate * factor, self.tokens, self.step_ms / 1000)


class Carried(msgspec.Struct, frozen=True):
    """One window of one subject. `cores`: shares of a core; the subject's own is that of the core it is alone on."""

    subject: str
    rate: float
    tokens_s: float
    open: int
    ttft: Latencies
    age: Latencies
    tokens_per_chunk: float
    broken: int
    cores: dict[str, float]


class Memory(msgspec.Struct, frozen=True):
    subject: str
    streams: int
    empty_mib: float
    kib_per_stream: float


class ColdStart(msgspec.Struct, frozen=True):
    """From the process' start until /readyz says yes; the median of `starts`."""

    customers: int
    adapters: int
    starts: int
    seconds: float


class Added(msgspec.Struct, frozen=True):
    """By the whole road at the peak: the gateway's milliseconds less the bare server's, p50 and p99."""

    ttft_ms: tuple[float, float]
    token_ms: tuple[float, float]


class Most(msgspec.Struct, frozen=True):
    """The highest rate tried whose p99 kept within; 0: none did. `then`: the next one, which did not; 0: not found."""

    p99_within_ms: float
    rate: float
    tokens_s: float
    then: float


class Result(msgspec.Struct, frozen=True):
    pinned_to: int
    others_on: list[int]
    rows: str
    carried: list[Carried]
    added: Added
    most: list[Most]
    memory: list[Memory]
    cold_starts: list[ColdStart]


@dataclass
class Bench:
    """On a running stack with one gateway and no worker. `core` is the gateway's; `others` is for all else."""

    stage: Stage
    plan: Plan
    core: int
    others: set[int]
    told: Callable[[str], None]
    starts: list[ColdStart] = field(default_factory=list)

    async def run(self) -> Result:
        plan, stage = self.plan, self.stage
        model = await asyncio.to_thread(BaseModel.load, stage.model)
        stamps = Stamps(model.vocabulary.pieces)
        body = _bodies(stamps, plan)
        pin(self._gateway, {self.core})
        for count in sorted({min(FEW, plan.customers), plan.customers}):
            self.told(f"writing {count} customers")
            await crowd.write(stage.kafka, await asyncio.to_thread(base_hash, stage.model), range(count))
            self.starts.append(await self._cold_starts(count))
        async with AsyncExitStack() as ready:
            shape = str(plan.replicas), f"{plan.step_ms:g}"
            self.told(f"{plan.replicas} replicas claim their places")
            replicas = await ready.enter_async_context(beside(stage.environment, "replay.paced_replicas", *shape))
            bare = await ready.enter_async_context(beside({}, "replay.barestream", str(stage.model), *shape))
            pin(bare.pid, {self.core})
            await asyncio.sleep(SETTLE_S)
            subjects = {"lorafleet": Beside(stage.url, "", self._gateway), "bare aiohttp": bare}
            clients = {
                name: await ready.enter_async_context(RawStreams(subject.url, body, stamps))
                for name, subject in subjects.items()
            }
            memory = [await self._memory(name, subjects[name].pid, client) for name, client in clients.items()]
            carried = [
                await self._carry(name, subjects[name].pid, clients[name], 1.0, replicas.pid) for name in clients
            ]
            ours, theirs = carried
            for factor in plan.factors:
                if carried[-1].subject == "lorafleet" and carried[-1].age.p99_ms > BOUNDS_MS[-1]:
                    break
                carried.append(
                    await self._carry("lorafleet", self._gateway, clients["lorafleet"], factor, replicas.pid)
                )
        return Result(
            pinned_to=self.core,
            others_on=sorted(self.others),
            rows="written straight to the compacted topics",
            carried=carried,
            added=Added(_less(ours.ttft, theirs.ttft), _less(ours.age, theirs.age)),
            most=[_most([one for one in carried if one.subject == "lorafleet"], bound) for bound in BOUNDS_MS],
            memory=memory,
            cold_starts=self.starts,
        )

    @property
    def _gateway(self) -> int:
        return next(part.pid for part in self.stage.state().parts if part.name == "gateway-0")

    async def _carry(self, name: str, pid: int, client: RawStreams, factor: float, replicas: int) -> Carried:
        plan, shape = self.plan, self.plan.shape(factor)
        self.told(f"{name}: {shape.rate:g} requests/s, {shape.rate * shape.tokens:,.0f} tokens/s")
        pin(pid, {self.core})  # threads that came since
        processes = self._processes(pid, replicas)
        async with client.steady(shape, plan.warm_s):
            shares = Shares(processes)
            seen = await client.window(plan.seconds)
            cores = shares.taken()
        await asyncio.sleep(SETTLE_S)  # what was cut off is cancelled
        ttft, age = Samples(shape.rate, seen.ttft, len(seen.broken)), Samples(shape.rate, seen.ages)
        return Carried(
            subject=name,
            rate=shape.rate,
            tokens_s=round(len(seen.ages) / seen.seconds, 1),
            open=shape.open,
            ttft=ttft.latencies(),
            age=age.latencies(),
            tokens_per_chunk=round(len(seen.ages) / max(1, seen.chunks), 2),
            broken=len(seen.broken),
            cores=cores,
        )

    def _processes(self, subject: int, replicas: int) -> dict[str, list[int]]:
        parts = {part.name: part.pid for part in self.stage.state().parts if part.pid not in (0, subject)}
        kafka = parts.pop("kafka", 0)
        groups = {"subject": [subject], "replicas": [replicas], "client": [os.getpid()]}
        if kafka:
            groups["kafka"] = _family(kafka)
        return groups | {"rest": [pid for part in parts.values() for pid in _family(part)]}

    async def _memory(self, name: str, pid: int, client: RawStreams) -> Memory:
        """Between none and `streams` open and all but silent; once before, so that what is made once is there."""
        for streams in (min(50, self.plan.streams), self.plan.streams):
            self.told(f"{name}: {streams} open streams")
            before = pss_bytes(pid)
            for number in range(streams):
                await client.start(number, self.plan.tokens, SLOW)
                await asyncio.sleep(0.004)
            await asyncio.sleep(SETTLE_S)
            held, still = pss_bytes(pid), len(client)
            client.cut()
            await asyncio.sleep(SETTLE_S)
        if still < self.plan.streams:
            raise RuntimeError(f"{name}: only {still} of {self.plan.streams} streams stayed open")
        return Memory(name, still, round(before / 2**20, 1), round((held - before) / 1024 / still, 1))

    async def _cold_starts(self, count: int) -> ColdStart:
        """Of a second gateway, on the first one's core, which is idle."""
        stage, took = self.stage, []
        for number in range(self.plan.starts):
            self.told(f"cold start {number + 1} of {self.plan.starts} with {count} customers and adapters")
            port, internal = pick(set()), pick(set())
            part = gateway_part(SPARE_PLACE, port, internal, stage.environment, stage.home, take_over=True)
            began = time.perf_counter()
            child = Child(part.prepare())
            try:
                pin(child.pid, {self.core})
                while not await asyncio.to_thread(part.ready, child):
                    if child.returncode() is not None:
                        raise RuntimeError(f"the gateway ended: {child.last_words()}")
                    await asyncio.sleep(0.01)
                took.append(time.perf_counter() - began)
            finally:
                await asyncio.to_thread(child.stop)
        return ColdStart(count, count, len(took), round(sorted(took)[len(took) // 2], 2))


def _bodies(stamps: Stamps, plan: Plan) -> Body:
    dice, who = random.Random(0), crowd.asking(plan.customers)
    words = [word.decode() for word in stamps.words]  # in the vocabulary's order, about that of their frequency
    frequency = [1 / (rank + 1) for rank in range(len(words))]  # as in any text (Zipf): tokenizers remember words
    prompts = [" ".join(dice.choices(words, frequency, k=PROMPT_WORDS)) for _ in range(PROMPTS)]

    def body(number: int, tokens: int, pace: int) -> tuple[str, bytes]:
        customer = next(who)
        asked = {
            "model": crowd.alias(customer),
            "messages": [{"role": "user", "content": prompts[number % PROMPTS]}],
            "max_tokens": tokens,
            "seed": pace,
            "stream": True,
        }
        return crowd.key(customer), msgspec.json.encode(asked)

    return body


def _family(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _less(ours: Latencies, theirs: Latencies) -> tuple[float, float]:
    return round(ours.p50_ms - theirs.p50_ms, 2), round(ours.p99_ms - theirs.p99_ms, 2)


def _most(carried: list[Carried], bound: float) -> Most:
    held = [one for one in carried if one.age.p99_ms <= bound and not one.broken]
    best = max(held, key=lambda one: one.rate, default=None)
    over = [one.rate for one in carried if one not in held and (best is None or one.rate > best.rate)]
    if best is None:
        return Most(bound, 0.0, 0.0, min(over, default=0.0))
    return Most(bound, best.rate, best.tokens_s, min(over, default=0.0))
