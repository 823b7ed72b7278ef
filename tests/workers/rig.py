"""A worker process under test, with a gateway's end of the topics in the test's own hands."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from infra.local.child import Child, Spec, python
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.reasons import FinishReason
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaStatus
from schemas.requests import Cancel, Sampling, Submit
from schemas.stats import AttemptFinished, CacheEvent
from schemas.tokens import Finished, Rejected, TokenBatch, TokenEvent, Tokens
from schemas.topics import CACHE_EVENTS, FINISHED, GATEWAYS, REPLICAS, REQUESTS, TOKENS
from streams.adapters.base_model import base_hash
from streams.bus.admin import ensure_topics
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from workers.engine.simulated import simulated_token
from workers.loader.folders import Folders

VOCAB = 1000
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 20_000,
}


def model(folder: Path) -> Path:
    """A base model that is enough for the simulated engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.ones(CONFIG["hidden_size"], np.float32)}, folder / "model.safetensors")
    return folder


def answer(prompt: list[int], count: int, content_id: str = "") -> list[int]:
    """The right output."""
    return [simulated_token(content_id, prompt, position, VOCAB) for position in range(count)]


@dataclass
class Heard:
    """Everything that one attempt was told, checked to be in order as it comes."""

    events: list[TokenEvent] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    first_position: int = -1
    end: Finished | Rejected | None = None

    def take(self, event: TokenEvent) -> None:
        assert self.end is None, f"{event} came after {self.end}"
        self.events.append(event)
        if isinstance(event, Tokens):
            if self.first_position < 0:
                self.first_position = event.position
            assert event.position == self.first_position + len(self.ids), f"{event}: a gap or a repeat"
            self.ids += event.ids
        elif isinstance(event, Finished | Rejected):
            self.end = event


class Rig:
    """Gateway place 1, incarnation 7, and as many workers as a test starts."""

    gateway, incarnation = 1, 7

    def __init__(self, kafka: str, namespace: str, folder: Path) -> None:
        self.settings = KafkaSettings(bootstrap_servers=kafka, namespace=namespace, replica_places=4, gateway_places=4)
        self.folder = folder
        self.model = model(folder / "model")
        self.base_hash = base_hash(self.model)
        self.writer = Writer(self.settings, "rig")
        self.reader = Reader(
            self.settings,
            {
                TOKENS: {self.gateway: "start"},
                REPLICAS: {0: "start"},
                FINISHED: dict.fromkeys(range(8), "start"),
                CACHE_EVENTS: dict.fromkeys(range(8), "start"),
            },
            "rig",
            fetch_wait_ms=20,
        )
        self.heard: dict[tuple[str, int], Heard] = {}
        self.batches: list[TokenBatch] = []
        self.claims: list[tuple[int, ReplicaClaim]] = []
        self.beats: list[tuple[float, ReplicaBeat]] = []
        self.rows: list[AttemptFinished] = []
        self.cache: list[CacheEvent] = []
        self.children: list[Child] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._silent = False

    async def start(self) -> None:
        await ensure_topics(self.settings)
        await self.writer.start()
        await self.reader.start()
        await self.writer.send(GATEWAYS, GatewayClaim(self.gateway, "rig", 0, 0), key=str(self.gateway))
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        for child in self.children:
            child.kill()
            await self.until(lambda child=child: child.returncode() is not None, 10, "its end")  # type: ignore[misc]
            left = Folders(child.spec.log.parent / "data")  # what a killed worker leaves, its next life would remove
            left.clean()
            left.remove_ram()
        await self.writer.stop(0)
        await self.reader.stop()

    def worker(self, env: Mapping[str, str] | None = None, *, replica: int = 0, name: str = "", **more: str) -> Child:
        """Starts a worker process. `name` tells its log from another one's of the same place."""
        folder = self.folder / f"worker-{replica}{name}"
        child = Child(
            Spec(
                f"worker-{replica}",
                python("workers"),
                log=folder / "log",
                env={
                    "KAFKA_BOOTSTRAP_SERVERS": self.settings.bootstrap_servers,
                    "LORAFLEET_NAMESPACE": self.settings.namespace,
                    "LORAFLEET_REPLICA_PLACES": "4",
                    "LORAFLEET_GATEWAY_PLACES": "4",
                    "LORAFLEET_MODEL": str(self.model),
                    "LORAFLEET_STORE": f"file://{self.folder}/store",
                    "WORKER_REPLICA": str(replica),
                    "WORKER_ENGINE": "simulated",
                    "WORKER_DATA": str(folder / "data"),
                    "WORKER_KV_TOKENS": "65536",
                    **(env or {}),
                    **more,
                },
            )
        )
        self.children.append(child)
        return child

    async def ready(self, child: Child) -> int:
        """Waits for the `ready` line; the incarnation."""
        await self.until(lambda: child.said_ready() or child.returncode() is not None, 40, "ready")
        assert child.said_ready(), child.output()
        return int(re.findall(r"^ready .*incarnation=(\d+)", child.output(), re.MULTILINE)[-1])

    def engine(self, child: Child) -> int:
        """The process id of the worker's engine."""
        return int(re.findall(r"engine \w+: process (\d+)", child.output())[-1])

    async def exit_status(self, child: Child, limit_s: float = 20) -> int:
        await self.until(lambda: child.returncode() is not None, limit_s, "the worker's end")
        code = child.returncode()
        assert code is not None
        return code

    async def until(self, holds: Callable[[], bool], limit_s: float = 15, what: str = "it") -> None:
        end = time.monotonic() + limit_s
        while not holds():
            for task in self._tasks:
                if task.done():
                    task.result()
            words = "\n".join(child.last_words(40) for child in self.children)
            assert time.monotonic() < end, f"{what}: not within {limit_s} s\n{words}"
            await asyncio.sleep(0.01)

    async def submit(self, request: str, prompt: list[int], count: int, incarnation: int, **more: Any) -> Submit:
        replica = more.get("replica", 0)
        submit = Submit(
            **{
                "request_id": request,
                "attempt": 0,
                "customer": "acme",
                "adapter": "",
                "content_id": "",
                "base_hash": self.base_hash,
                "replica": replica,
                "incarnation": incarnation,
                "gateway": self.gateway,
                "gateway_incarnation": self.incarnation,
                "prompt": prompt,
                "generated": [],
                "max_tokens": count,
                "sampling": Sampling(1),
                "stop_ids": [],
                "remaining_ms": 60_000,
                **more,
            }
        )
        await self.writer.send(REQUESTS, submit, key=request, partition=replica)
        return submit

    async def cancel(self, request: str, attempt: int = 0, replica: int = 0) -> None:
        cancel = Cancel(request, attempt, self.gateway, self.incarnation)
        await self.writer.send(REQUESTS, cancel, key=request, partition=replica)

    def of(self, request: str, attempt: int = 0) -> Heard:
        return self.heard.setdefault((request, attempt), Heard())

    async def ended(self, request: str, attempt: int = 0, limit_s: float = 15) -> Finished | Rejected:
        heard = self.of(request, attempt)
        await self.until(lambda: heard.end is not None, limit_s, f"the end of {request}/{attempt}")
        assert heard.end is not None
        return heard.end

    async def finished(self, request: str, reason: FinishReason, attempt: int = 0, limit_s: float = 15) -> Heard:
        end = await self.ended(request, attempt, limit_s)
        assert isinstance(end, Finished)
        assert end.reason is reason, end
        return self.of(request, attempt)

    def gone(self, incarnation: int) -> ReplicaBeat | None:
        """The incarnation's last word."""
        beats = [b for _, b in self.beats if b.incarnation == incarnation and b.status is ReplicaStatus.GONE]
        return beats[-1] if beats else None

    def fall_silent(self) -> None:
        """The gateway beats no more."""
        self._silent = True

    async def _beat(self) -> None:
        number = 0
        while True:
            if not self._silent:
                beat = GatewayBeat(self.gateway, self.incarnation, number, 0, {})
                await self.writer.send(GATEWAYS, beat, key=str(self.gateway), timeout_s=60)
                number += 1
            await asyncio.sleep(1)

    async def _listen(self) -> None:
        async for records in self.reader:
            for record in records:
                self._take(record.offset, record.value)

    def _take(self, offset: int, value: Any) -> None:
        match value:
            case TokenBatch():
                self.batches.append(value)
                for event in value.events:
                    self.of(event.request_id, event.attempt).take(event)
            case ReplicaClaim():
                self.claims.append((offset, value))
            case ReplicaBeat():
                self.beats.append((time.monotonic(), value))
            case AttemptFinished():
                self.rows.append(value)
            case CacheEvent():
                self.cache.append(value)
