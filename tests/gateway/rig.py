"""Gateway and worker processes under test, on a real broker, with customers' keys and the right answers."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from openai import AsyncOpenAI

from gateway.base_model import BaseModel
from gateway.detokenizer import Detokenizer
from gateway.openai_api import Message
from infra.local.child import Child, Spec, python
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role
from schemas.topics import CUSTOMERS
from streams.adapters.shape import ModelShape
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from tests.stack import wait_until
from tests.streams.adapters.files import config, write
from workers.engine.simulated import simulated_token

NOTHING: Mapping[str, str] = MappingProxyType({})
OPERATOR, PIPELINE, ACME, GLOBEX = "lf-operator", "lf-pipeline", "lf-acme", "lf-globex"
T = TypeVar("T")


def body(model: str, question: str, count: int, stream: bool = True) -> bytes:
    """A chat's body, for those who speak HTTP by hand."""
    chat = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": count, "stream": stream}
    return json.dumps(chat).encode()


def customer(name: str, *keys: tuple[str, Role], max_in_flight: int = 64) -> Customer:
    return Customer(name, [ApiKey(sha256(k.encode()).hexdigest(), k[:9], role) for k, role in keys], max_in_flight)


CUSTOMERS_MADE = [
    customer("ops", (OPERATOR, Role.OPERATOR)),
    customer("acme", (ACME, Role.CUSTOMER), (PIPELINE, Role.PIPELINE)),
    customer("globex", (GLOBEX, Role.CUSTOMER), max_in_flight=2),
]


class Rig:
    """One fleet in a namespace of its own. Everything blocks, but for what the tests await."""

    def __init__(self, kafka: str, namespace: str, model: Path, folder: Path) -> None:
        self.settings = KafkaSettings(bootstrap_servers=kafka, namespace=namespace, replica_places=4, gateway_places=4)
        self.model_folder, self.folder = model, folder
        self.model = BaseModel.load(model)
        self.children: list[Child] = []
        self._port = 0

    def prepare(self) -> None:
        """Topics and customers."""

        async def write() -> None:
            await ensure_topics(self.settings)
            async with Writer(self.settings, "rig") as writer:
                for made in CUSTOMERS_MADE:
                    await writer.send(CUSTOMERS, made, key=made.customer)

        asyncio.run(write())

    def gateway(
        self,
        port: int,
        internal_port: int,
        place: int = 0,
        limit_s: float = 120,
        env: Mapping[str, str] = NOTHING,
        module: str = "gateway",
    ) -> "Door":
        child = self._start(
            f"gateway-{place}",
            module,
            {
                "GATEWAY_PLACE": str(place),
                "GATEWAY_PORT": str(port),
                "GATEWAY_INTERNAL_PORT": str(internal_port),
                "GATEWAY_REQUEST_LIMIT_S": str(limit_s),
                **env,
            },
        )
        scheme = "https" if "GATEWAY_TLS_CERT" in env else "http"
        return Door(child, f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{internal_port}")

    def worker(self, replica: int = 0, module: str = "workers", **env: str) -> Child:
        return self._start(
            f"worker-{replica}",
            module,
            {
                "WORKER_REPLICA": str(replica),
                "WORKER_ENGINE": "simulated",
                "WORKER_DATA": str(self.folder / f"worker-{replica}" / "data"),
                "WORKER_KV_TOKENS": "65536",
                **env,
            },
        )

    def control(self) -> Child:
        (self.folder / "inbox").mkdir(exist_ok=True)
        (self.folder / "store").mkdir(exist_ok=True)
        sources = {"LORAFLEET_SOURCES": f"file://{self.folder}/inbox", "LORAFLEET_HOME": str(self.folder / "home")}
        return self._start("control", "streams.control", sources)

    def registration(
        self, adapter_id: str, seed: int, rank: int = 4, modules: Sequence[str] = ("q",)
    ) -> dict[str, Any]:
        """Writes a small adapter in PEFT's format into the inbox; the body that registers it."""
        random, shape = np.random.default_rng(seed), ModelShape.of(self.model_folder)
        weights = {}
        for matrix in modules:
            k, d = shape.matrices()[matrix]
            for layer in range(shape.layers):
                name = f"base_model.model.model.layers.{layer}.self_attn.{matrix}_proj"
                weights[f"{name}.lora_A.weight"] = random.normal(0, 0.1, (rank, k)).astype(np.float32)
                weights[f"{name}.lora_B.weight"] = random.normal(0, 0.1, (d, rank)).astype(np.float32)
        told = {"r": rank, "lora_alpha": 8, "target_modules": [f"{matrix}_proj" for matrix in modules]}
        path, checksum = write(
            self.folder / "inbox" / f"{adapter_id.replace('/', '-')}-{seed}", weights, config(**told)
        )
        return {
            "adapter_id": adapter_id,
            "version": int(adapter_id.rpartition("@")[2]),
            "base_model_hash": self.model.base_hash,
            "rank": rank,
            "alpha": 8,
            "target_modules": told["target_modules"],
            "weights_uri": f"file://{path}",
            "checksum": checksum,
        }

    def ready(self, *children: Child) -> None:
        for child in children:
            wait_until(lambda c=child: c.said_ready() or c.returncode() is not None, 60, child.spec.name)  # type: ignore[misc]
            assert child.said_ready(), child.output()

    def stop(self) -> None:
        for child in reversed(self.children):
            child.kill()
        for child in self.children:
            wait_until(lambda c=child: c.returncode() is not None, 10, f"{child.spec.name}'s end")  # type: ignore[misc]

    def prompt(self, text: str) -> list[int]:
        return self.model.vocabulary.encode(self.model.template.render([Message("user", text)]))

    def ids(self, text: str, count: int, content_id: str = "") -> list[int]:
        """The right output for a user's message, as the simulated engine computes it."""
        prompt, vocab = self.prompt(text), len(self.model.vocabulary.pieces)
        return [simulated_token(content_id, prompt, position, vocab) for position in range(count)]

    def answer(self, text: str, count: int, content_id: str = "") -> str:
        return Detokenizer(self.model.vocabulary.pieces).push(self.ids(text, count, content_id))

    def _start(self, name: str, module: str, env: dict[str, str]) -> Child:
        child = Child(
            Spec(
                name,
                python(module),
                log=self.folder / name / "log",
                env={
                    "KAFKA_BOOTSTRAP_SERVERS": self.settings.bootstrap_servers,
                    "LORAFLEET_NAMESPACE": self.settings.namespace,
                    "LORAFLEET_REPLICA_PLACES": "4",
                    "LORAFLEET_GATEWAY_PLACES": "4",
                    "LORAFLEET_MODEL": str(self.model_folder),
                    "LORAFLEET_STORE": f"file://{self.folder}/store",
                    **env,
                },
            )
        )
        self.children.append(child)
        return child


class Door:
    """One gateway's two ports."""

    def __init__(self, child: Child, url: str, internal: str) -> None:
        self.child, self.url, self.internal = child, url, internal

    def client(self, key: str = ACME) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        with urllib.request.urlopen(f"{self.internal}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def sees(self, replicas: int) -> None:
        """Waits until the gateway has heard a live beat of each. Blocks."""
        wait_until(lambda: self.metric("lorafleet_gateway_live_replicas") == replicas, 15, "live replicas")

    def told(
        self,
        path: str,
        key: str = OPERATOR,
        method: str = "GET",
        body: Any = None,
        headers: Mapping[str, str] = NOTHING,
    ) -> tuple[int, Any]:
        """A call to the internal port: status and JSON. Blocks."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.internal + path, data=data, method=method, headers=dict(headers))
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=70) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def rows(self) -> int:
        """Sequences that run or wait, over all replicas, as they last said."""
        _, told = self.told("/internal/replicas")
        return sum(replica.get("running", 0) + replica["queue_depth"] for replica in told["replicas"])


async def text_of(door: Door, model: str, question: str, count: int, key: str = ACME) -> str:
    """A streamed chat's text. Fails unless it ends by its length."""
    async with door.client(key) as client:
        chunks = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=count, stream=True
        )
        choices = [chunk.choices[0] async for chunk in chunks]
    assert choices[-1].finish_reason == "length"
    return "".join(choice.delta.content or "" for choice in choices)


async def until(holds: Callable[[], bool], limit_s: float, what: str) -> None:
    """`holds` may block: it runs beside the loop."""
    end = time.monotonic() + limit_s
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end, f"{what}: not within {limit_s:g} s"
        await asyncio.sleep(0.02)


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(limit_s):
        return await work
