"""What the road costs: gateway, Kafka and worker I/O, with a simulated engine that computes in no time.

A request asks for one token, so its latency is HTTP in, the Submit's hop, the worker, the engine's socket, the token's
hop, and SSE out. Beside it, in the same run: a bare aiokafka round trip of two hops on the same broker
(replay/pingpong.py); the same gateway and worker code over an in-process log (replay/direct.py); and a bare HTTP
server that sends the same chunks at once (replay/barehttp.py), for a client pays that to whoever answers. What the road
adds is its latency less the bare server's.
"""

import asyncio

import msgspec

from replay.openloop import LEAST, Latencies, drive
from replay.pingpong import measure as pingpong
from replay.rawchat import RawChats
from replay.stage import Stage

CUSTOMER = "hop"


class Hop(msgspec.Struct, frozen=True):
    """One rate. Ratios are (p50, p99) to the bare round trip's."""

    lorafleet: Latencies
    pingpong: Latencies
    direct: Latencies
    http: Latencies

    @property
    def ratios(self) -> tuple[float, float]:
        """Of the whole path, HTTP included."""
        ours, bare = self.lorafleet, self.pingpong
        return round(ours.p50_ms / bare.p50_ms, 2), round(ours.p99_ms / bare.p99_ms, 2)

    @property
    def added(self) -> tuple[float, float]:
        """Of what is added to the bare HTTP server's."""
        ours, bare, http = self.lorafleet, self.pingpong, self.http
        return round((ours.p50_ms - http.p50_ms) / bare.p50_ms, 2), round((ours.p99_ms - http.p99_ms) / bare.p99_ms, 2)


async def drive_chats(url: str, key: str, model: str, rates: list[float], seconds: float) -> list[Latencies]:
    """One-token streams at each rate; latency is to the first content byte."""
    body = msgspec.json.encode(
        {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1, "stream": True}
    )
    async with RawChats(url, key, body) as chat:
        await drive(50, 2, chat)  # caches, connections and the JVM warm up
        return [await drive(rate, max(seconds, LEAST / rate), chat) for rate in rates]


async def measure(
    stage: Stage, direct: list[Latencies], http: list[Latencies], rates: list[float], seconds: float
) -> list[Hop]:
    """On a running stack whose workers have the simulated engine. The rest was measured before, rate by rate."""
    async with stage.operator() as operator:
        tenant = await operator.make_customer(CUSTOMER)
    model = stage.model.name
    ours = await drive_chats(stage.url, tenant.key, model, rates, seconds)
    await asyncio.sleep(1)
    bare = await pingpong(stage.kafka.bootstrap_servers, rates, seconds)
    return [Hop(*row) for row in zip(ours, bare, direct, http, strict=True)]
