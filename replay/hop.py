"""What the road costs: gateway, Kafka and worker I/O, with a simulated engine that computes in no time.

A request asks for one token, so its latency is HTTP in, the Submit's hop, the worker, the engine's socket, the token's
hop, and SSE out. Beside it, in the same run and on the same broker, a bare aiokafka round trip of two hops
(replay/pingpong.py), and the same gateway and worker code over an in-process log (replay/direct.py).
"""

import asyncio

import msgspec

from replay.openloop import LEAST, Latencies, drive
from replay.pingpong import measure as pingpong
from replay.rawchat import RawChats
from replay.stage import Stage

CUSTOMER = "hop"


class Hop(msgspec.Struct, frozen=True):
    """One rate: the whole path, the bare round trip, and the path without Kafka."""

    lorafleet: Latencies
    pingpong: Latencies
    direct: Latencies

    @property
    def p50_ratio(self) -> float:
        return round(self.lorafleet.p50_ms / self.pingpong.p50_ms, 2)

    @property
    def p99_ratio(self) -> float:
        return round(self.lorafleet.p99_ms / self.pingpong.p99_ms, 2)


async def drive_chats(url: str, key: str, model: str, rates: list[float], seconds: float) -> list[Latencies]:
    """One-token streams at each rate; latency is to the first content byte."""
    body = msgspec.json.encode(
        {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1, "stream": True}
    )
    async with RawChats(url, key, body) as chat:
        await drive(50, 2, chat)  # caches, connections and the JVM warm up
        return [await drive(rate, max(seconds, LEAST / rate), chat) for rate in rates]


async def measure(stage: Stage, direct: list[Latencies], rates: list[float], seconds: float) -> list[Hop]:
    """On a running stack whose workers have the simulated engine. `direct` was measured before, rate by rate."""
    async with stage.operator() as operator:
        tenant = await operator.make_customer(CUSTOMER)
    model = stage.model.name
    ours = await drive_chats(stage.url, tenant.key, model, rates, seconds)
    await asyncio.sleep(1)
    bare = await pingpong(stage.kafka.bootstrap_servers, rates, seconds)
    return [Hop(a, b, c) for a, b, c in zip(ours, bare, direct, strict=True)]
