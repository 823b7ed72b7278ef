"""The replicas' side of the protocol in one process: COUNT places that answer each request at a steady pace.

`python -m replay.paced_replicas COUNT STEP_MS` in a stack's environment claims the places, beats, and prints
`ready - -`. Each place has its own reader, writer and rhythm, as a worker has, and writes one TokenBatch per step;
there is no engine, no loader and no model behind it, which for 26 replicas would be 52 processes: on the cores that a
gateway leaves over they, not the gateway, would be what is measured. The first token leaves as soon as its Submit
comes, so that a client's time to first token is all of the road's; from then on each request gets a token per step, or
per `seed` steps. Every token says when it was made (replay/stamps.py).

Ordering relied on: each partition's. A crash: gateways hear the silence, as they would of workers.
"""

import asyncio
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import uvloop

from gateway.base_model import BaseModel
from replay.beside import end_with_stdin
from replay.stamps import Stamps
from schemas.reasons import FinishReason, Tier
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaStatus, Residency
from schemas.requests import Cancel, Submit
from schemas.tokens import Admitted, Finished, LoadReport, TokenBatch, TokenEvent, Tokens
from schemas.topics import REPLICAS, REQUESTS, TOKENS
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

CLASS = "paced"
BEAT_S = 1.0
FETCH_WAIT_MS = 250
ROOM = 1 << 40  # tokens in flight: it is never full


@dataclass
class Running:
    submit: Submit
    length: int = 0


class PacedReplica:
    """One place, from its claim on."""

    def __init__(self, kafka: KafkaSettings, place: int, base_hash: str, stamps: Stamps) -> None:
        self._kafka, self._place, self._base_hash, self._stamps = kafka, place, base_hash, stamps
        self._running: dict[str, Running] = {}
        self._steps = 0

    async def run(self, step_s: float, phase_s: float, claimed: asyncio.Barrier) -> None:
        """For ever. `phase_s`: by how much its steps come after the full step of the clock."""
        place = self._place
        reader = Reader(
            self._kafka, {REQUESTS: {place: "end"}}, f"paced-{place}", fetch_wait_ms=FETCH_WAIT_MS, max_records=200
        )
        async with reader, Writer(self._kafka, f"paced-{place}") as hot, Writer(self._kafka, f"beats-{place}") as cold:
            start = reader.position(REQUESTS, place)
            claim = ReplicaClaim(place, uuid.uuid4().hex, start, self._base_hash, CLASS, _unix_ms())
            written = await cold.send(REPLICAS, claim, key=str(place), timeout_s=30.0)
            self._incarnation, self._start, self._reader, self._hot = written.offset, start, reader, hot
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(cold, claimed), name="beats")
                tasks.create_task(self._read(), name="requests")
                tasks.create_task(self._step(step_s, phase_s), name="steps")

    async def _beat(self, cold: Writer, claimed: asyncio.Barrier) -> None:
        number = 0
        while True:
            number += 1
            beat = ReplicaBeat(
                self._place, self._incarnation, self._start, number, ReplicaStatus.READY, self._steps, self._load(),
                Residency(), self._base_hash, CLASS, ROOM, _unix_ms(),
            )  # fmt: skip
            await cold.send(REPLICAS, beat, key=str(self._place), timeout_s=30.0)
            if number == 1:
                await claimed.wait()
            await asyncio.sleep(BEAT_S)

    async def _read(self) -> None:
        while True:
            fresh: list[Running] = []
            for record in await self._reader.poll():
                match record.value:
                    case Submit() as submit if submit.incarnation == self._incarnation:
                        fresh.append(Running(submit, len(submit.generated)))
                        self._running[submit.request_id] = fresh[-1]
                    case Cancel() as cancel:
                        self._running.pop(cancel.request_id, None)
            self._tell([one for one in fresh if one.submit.request_id in self._running], admitted=True)

    async def _step(self, step_s: float, phase_s: float) -> None:
        due = time.monotonic() // step_s * step_s + phase_s
        while True:
            due += step_s
            await asyncio.sleep(due - time.monotonic())
            self._steps += 1
            self._tell([one for one in self._running.values() if self._steps % max(1, one.submit.sampling.seed) == 0])

    def _tell(self, told: list[Running], admitted: bool = False) -> None:
        """A token for each, in one record per gateway."""
        says: dict[tuple[int, int], list[TokenEvent]] = defaultdict(list)
        token = self._stamps.ids[self._stamps.moment(time.monotonic())]
        for one in told:
            submit = one.submit
            events = says[submit.gateway, submit.gateway_incarnation]
            key = submit.request_id, submit.attempt
            if admitted:
                events.append(Admitted(*key, Tier.GPU if submit.adapter else Tier.NONE))
            events.append(Tokens(*key, one.length, [token]))
            one.length += 1
            if one.length >= submit.max_tokens:
                events.append(Finished(*key, one.length, FinishReason.LENGTH))
                del self._running[submit.request_id]
        load = self._load()
        for gateway, events in says.items():
            batch = TokenBatch(self._place, self._incarnation, *gateway, load, events)
            self._hot.send_nowait(TOKENS, batch, partition=gateway[0])

    def _load(self) -> LoadReport:
        left = sum(one.submit.max_tokens - one.length for one in self._running.values())
        return LoadReport(self._reader.position(REQUESTS, self._place), len(self._running), 0, left)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


async def serve(count: int, step_ms: float) -> None:
    """Until killed."""
    kafka, model = KafkaSettings.from_env(), BaseModel.load(Path(os.environ["LORAFLEET_MODEL"]))
    stamps, claimed, step_s = Stamps(model.vocabulary.pieces), asyncio.Barrier(count + 1), step_ms / 1000
    async with asyncio.TaskGroup() as tasks:
        for place in range(count):
            replica = PacedReplica(kafka, place, model.base_hash, stamps)
            tasks.create_task(replica.run(step_s, place * step_s / count, claimed), name=f"replica {place}")
        await claimed.wait()
        print("ready - -", flush=True)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
