"""What the road costs: gateway, Kafka and worker I/O, with a simulated engine that computes in no time.

A request asks for one token, so its latency is HTTP in, the Submit's hop, the worker, the engine's socket, the token's
hop, and SSE out. Beside it, in the same run: a bare aiokafka round trip of two hops on the same broker
(replay/pingpong.py); the same gateway and worker code over an in-process log (replay/direct.py); a bare HTTP server
that sends the same chunks at once (replay/barehttp.py), for a client pays that to whoever answers; and the bare road,
which is that server, that round trip and a process behind a socket in one: the least that a road of these parts takes.
What the road adds is its latency less the bare server's.

All five stand ready at once and take turns, ROUNDS times at each rate: a machine's slow minute is everybody's, and what
its host takes away (`stolen`) is told.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from replay.beside import Beside
from replay.openloop import LEAST, Latencies, Request, Samples
from replay.pingpong import round_trips
from replay.rawchat import RawChats
from replay.stage import Stage

CUSTOMER = "hop"
ROUNDS = 3


class Hop(msgspec.Struct, frozen=True):
    """One rate. Ratios are (p50, p99), to the bare round trip's where nothing else is said."""

    lorafleet: Latencies
    pingpong: Latencies
    direct: Latencies
    http: Latencies
    road: Latencies
    stolen: float  # share of the cores' time that the machine's host gave to others

    @property
    def least(self) -> tuple[float, float]:
        """To the bare road's."""
        ours, road = self.lorafleet, self.road
        return round(ours.p50_ms / road.p50_ms, 2), round(ours.p99_ms / road.p99_ms, 2)

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


async def measure(
    stage: Stage, doors: Mapping[str, Beside], rates: list[float], seconds: float, told: Callable[[str], None]
) -> list[Hop]:
    """On a running stack whose workers have the simulated engine. `doors`: of direct, http and road."""
    async with stage.operator() as operator:
        tenant = await operator.make_customer(CUSTOMER)
    body = msgspec.json.encode(
        {
            "model": stage.model.name,
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 1,
            "stream": True,
        }
    )
    async with AsyncExitStack() as open_:
        trip = await open_.enter_async_context(round_trips(stage.kafka.bootstrap_servers))
        subjects: dict[str, Request] = {
            "lorafleet": (await open_.enter_async_context(RawChats(stage.url, tenant.key, body)))
        }
        subjects["pingpong"] = trip
        for name, door in doors.items():
            subjects[name] = await open_.enter_async_context(RawChats(door.url, door.key, body))
        for request in subjects.values():
            await Samples(50).drive(2, request)  # caches, connections and the JVM warm up
        return [await _rate(subjects, rate, max(seconds, LEAST / rate) / ROUNDS, told) for rate in rates]


async def _rate(
    subjects: Mapping[str, Callable[[int], Awaitable[float]]], rate: float, seconds: float, told: Callable[[str], None]
) -> Hop:
    samples = {name: Samples(rate) for name in subjects}
    stolen, total = _cpu_time()
    for turn in range(ROUNDS):
        for name, request in subjects.items():
            told(f"{rate:g}/s, round {turn + 1} of {ROUNDS}: {name}")
            await samples[name].drive(seconds, request, seed=turn)
    stolen, total = (after - before for before, after in zip((stolen, total), _cpu_time(), strict=True))
    return Hop(**{name: s.latencies() for name, s in samples.items()}, stolen=round(stolen / max(total, 1), 3))


def _cpu_time() -> tuple[int, int]:
    """What was stolen, and everything, of all cores since the machine's start (proc(5), /proc/stat)."""
    stat = Path("/proc/stat")
    ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]] if stat.exists() else [0] * 8
    return ticks[7], sum(ticks)
