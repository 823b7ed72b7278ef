"""The request path without Kafka: the gateway's and the worker's own code in one process, over an in-process log.

`python -m replay.direct` takes the environment of a stack's worker, serves chats on a free port of 127.0.0.1 and prints
`ready URL KEY`. Records are still encoded and decoded, so that what is missing is the broker and nothing else.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from gateway.app import public_app
from gateway.auth import Keys
from gateway.base_model import BaseModel
from gateway.catalogue import Catalogue
from gateway.chat import Chat
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.rates import Rates
from gateway.readiness import Readiness
from gateway.switchboard import Switchboard
from gateway.websocket import ChatSockets
from schemas.codec import decode, encode
from schemas.customers import ApiKey, Customer
from schemas.engine import Step
from schemas.reasons import Role, Tier
from schemas.replicas import ReplicaBeat, ReplicaStatus, Residency
from schemas.tokens import LoadReport
from schemas.topics import REQUESTS, TOKENS, Topic
from streams.bus.reader import Headers
from streams.bus.writer import Written
from streams.presence.claim import Claim
from workers.engine_client import EngineClient
from workers.inbox import Admit, Inbox
from workers.publisher import Publisher
from workers.sequences import Sequences
from workers.settings import WorkerSettings

KEY = "lf-direct"
INCARNATION = 1


class DirectWriter:
    """As much of streams.bus.writer.Writer as the hot path uses: a record reaches its reader in the next turn."""

    def __init__(self) -> None:
        self.readers: dict[str, Callable[[Any], None]] = {}
        self.offset = 0

    def send_nowait(
        self,
        topic: Topic,
        value: Any,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[Written]:
        loop = asyncio.get_running_loop()
        written: asyncio.Future[Written] = loop.create_future()
        written.set_result(Written(partition or 0, self.offset))
        self.offset += 1
        loop.call_soon(self.readers[topic.name], decode(topic, encode(topic, value)))
        return written


async def serve() -> None:
    """Until killed."""
    settings = WorkerSettings.from_env()
    engine = EngineClient(settings)
    ready = await engine.start()
    model = BaseModel.load(Path(settings.model), "")
    log: Any = DirectWriter()
    # The worker's half.
    sequences = Sequences(0, INCARNATION)
    inbox = Inbox(INCARNATION, ready.base_hash, ready.context_length, 256, lambda _: None, lambda *_: False)
    publisher = Publisher(log, 0, INCARNATION, lambda: sequences.load(log.offset), lambda *_: False)

    def intake(record: Any) -> None:
        for act in inbox.read(record, time.monotonic()):
            if isinstance(act, Admit):
                start, say = sequences.admit(act, Tier.NONE, time.monotonic())
                engine.send(start)
                publisher.add(say)
        publisher.flush()

    async def follow() -> None:
        async for event in engine.events():
            if isinstance(event, Step):
                says, ended = sequences.step(event, time.monotonic())
                for say in says:
                    publisher.add(say)
                for row in ended:
                    inbox.finished(row.request_id, row.attempt)
                publisher.flush()

    # The gateway's half.
    keys, catalogue, fleet = Keys(time.time), Catalogue(model.name, model.base_hash), Fleet(model.base_hash, {})
    keys.apply("direct", Customer("direct", [ApiKey(hashlib.sha256(KEY.encode()).hexdigest(), "lf-", Role.CUSTOMER)]))
    switchboard = Switchboard(log, model.base_hash, fleet, lambda: 0.0, lambda _: None, lambda _: None)
    switchboard.begin(Claim(0, INCARNATION, 0, ""))
    load = LoadReport(0, 0, 0, 0)
    beat = ReplicaBeat(
        0, INCARNATION, 0, 1, ReplicaStatus.READY, 1, load, Residency(), ready.base_hash, "", 1 << 30, 0
    )  # fmt: skip
    fleet.apply(1, beat, True, 0.0)
    log.readers = {REQUESTS.name: intake, TOKENS.name: switchboard.heard}
    readiness = Readiness(lambda: True, tables=True, claimed=True)
    chat = Chat(model, keys, catalogue, switchboard, readiness, Rates(), 120.0)
    app = public_app(
        chat,
        ChatSockets(chat, keys, readiness),
        Models(model, keys, catalogue, readiness),
        readiness,
        None,  # type: ignore[arg-type]  # the tables are asked by /readyz alone
        fleet,
        Metrics(),
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(), name="steps")
        tasks.create_task(engine.watch(), name="engine watch")
        print(f"ready http://127.0.0.1:{port} {KEY}", flush=True)


if __name__ == "__main__":
    uvloop.run(serve())
