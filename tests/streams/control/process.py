"""A control process of a fleet of its own: a tiny base, an inbox folder and a store folder, on the run's Kafka."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from schemas.adapters import (
    AdapterCommand,
    AdapterEvent,
    AdapterRecord,
    AliasCommand,
    AliasRecord,
    CommandResult,
    RegisterAdapter,
)
from schemas.customers import Customer
from schemas.topics import ADAPTER_COMMANDS, ADAPTER_EVENTS, ADAPTER_RESULTS, ADAPTERS, ALIASES, CUSTOMERS
from streams.adapters.base_model import base_hash
from streams.bus.admin import ensure_topics
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.table import Table, TableReader
from streams.bus.writer import Writer, Written
from tests.streams.adapters.files import TINY, config, tensors, write

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_model(folder: Path) -> Path:
    """A base model's folder with TINY's sizes in it and next to no weights."""
    folder.mkdir(parents=True)
    sizes = {
        "num_hidden_layers": TINY.layers,
        "hidden_size": TINY.hidden,
        "intermediate_size": TINY.intermediate,
        "num_attention_heads": TINY.heads,
        "num_key_value_heads": TINY.kv_heads,
        "head_dim": TINY.head_dim,
        "vocab_size": TINY.vocab,
        "max_position_embeddings": TINY.context,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file({"weight": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    return folder


class Fleet:
    """What a test needs of one: `send` a command, wait for its `result`, look at the tables. Its customer is acme."""

    def __init__(self, kafka: str, namespace: str, folder: Path) -> None:
        self.settings = KafkaSettings(kafka, namespace=namespace, replica_places=4, gateway_places=4)
        self.folder = folder
        self.inbox, self.store = folder / "in", folder / "store"
        self.inbox.mkdir()
        self.store.mkdir()
        self.model = tiny_model(folder / "model")
        self.base_hash = base_hash(self.model)
        self.adapters = Table[AdapterRecord](ADAPTERS)
        self.aliases = Table[AliasRecord](ALIASES)
        self.results: dict[str, list[CommandResult]] = {}
        self.events: list[AdapterEvent] = []
        self._arrived = asyncio.Event()
        self._process: subprocess.Popen[str] | None = None

    # The process.

    def start(self, dying: Sequence[str] = (), **env: str) -> None:
        """Returns before it is ready. `dying`: see dying_control.py."""
        told = {
            "KAFKA_BOOTSTRAP_SERVERS": self.settings.bootstrap_servers,
            "LORAFLEET_NAMESPACE": self.settings.namespace,
            "LORAFLEET_REPLICA_PLACES": "4",
            "LORAFLEET_GATEWAY_PLACES": "4",
            "LORAFLEET_MODEL": str(self.model),
            "LORAFLEET_STORE": f"file://{self.store}",
            "LORAFLEET_SOURCES": f"file://{self.inbox}",
            "LORAFLEET_HOME": str(self.folder / "home"),
            "LORAFLEET_MAX_RANK": "8",
            **env,
        }
        with (self.folder / "control.log").open("a") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    *(["tests.streams.control.dying_control", *dying] if dying else ["streams.control"]),
                ],
                env={**os.environ, **told},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    async def ready(self) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 60)
        assert line == "ready\n", self.log()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def stop(self) -> float:
        """SIGTERM. Seconds until it ended."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0, self.log()
        return time.monotonic() - began

    def log(self) -> str:
        return (self.folder / "control.log").read_text()

    # Its words.

    async def make(self, customer: str) -> None:
        """One without keys."""
        await self.writer.send(CUSTOMERS, Customer(customer, []), key=customer)

    async def send(self, command: AdapterCommand, key: str | None = None) -> Written:
        about = command.alias if isinstance(command, AliasCommand) else command.adapter_id
        customer = about.partition("/")[0]
        return await self.writer.send(ADAPTER_COMMANDS, command, key=key or customer)

    async def result(self, command_id: str, count: int = 1) -> CommandResult:
        """The newest of at least `count` results of this command."""
        async with asyncio.timeout(45):
            while len(self.results.get(command_id, [])) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.results[command_id][-1]

    async def ask(self, command: AdapterCommand, key: str | None = None) -> CommandResult:
        """Its last result: not that a flip will come."""
        await self.send(command, key)
        result, count = await self.result(command.command_id), 1
        while result.status == 202:
            count += 1
            result = await self.result(command.command_id, count)
        return result

    async def history(self, count: int) -> list[AdapterEvent]:
        """The events so far, at least `count` of them, without doubles."""
        async with asyncio.timeout(20):
            while True:
                found = {(e.command_partition, e.command_offset, e.kind): e for e in reversed(self.events)}
                if len(found) >= count:
                    return sorted(found.values(), key=lambda e: (e.command_partition, e.command_offset))
                self._arrived.clear()
                await self._arrived.wait()

    def upload(self, name: str, seed: int = 0, told: dict[str, Any] | None = None, **changes: Any) -> RegisterAdapter:
        """Writes an honest adapter `acme/support@7` into the inbox; the command that registers it, id `name`."""
        path, checksum = write(self.inbox / name, tensors(seed=seed), told or config())
        honest = RegisterAdapter(name, "acme/support@7", 7, self.base_hash, 4, 8.0, MODULES, f"file://{path}", checksum)
        if "adapter_id" in changes:
            changes.setdefault("version", int(changes["adapter_id"].rpartition("@")[2]))
        return msgspec.structs.replace(honest, **changes)

    async def row(self, result: CommandResult) -> None:
        """Waits until this reader has applied the record that the command wrote."""
        topic = {ADAPTERS.name: ADAPTERS, ALIASES.name: ALIASES}[result.table]
        await self.tables.applied(topic, result.partition, result.offset)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Fleet"]:
        await ensure_topics(self.settings)
        async with AsyncExitStack() as stack:
            self.writer = await stack.enter_async_context(Writer(self.settings, "test"))
            await self.make("acme")
            self.tables = await stack.enter_async_context(
                TableReader(self.settings, [self.adapters, self.aliases], "test")
            )
            reader = await stack.enter_async_context(
                Reader(
                    self.settings,
                    {topic: dict.fromkeys(range(8), "start") for topic in (ADAPTER_RESULTS, ADAPTER_EVENTS)},
                    "test results",
                )
            )
            collecting = asyncio.create_task(self._collect(reader))
            try:
                yield self
            finally:
                collecting.cancel()
                await asyncio.wait({collecting})
                self.kill()

    async def _collect(self, reader: Reader) -> None:
        async for records in reader:
            for record in records:
                if record.topic is ADAPTER_EVENTS:
                    self.events.append(record.value)
                else:
                    self.results.setdefault(record.value.command_id, []).append(record.value)
            self._arrived.set()
