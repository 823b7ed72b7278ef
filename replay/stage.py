"""A running stack as the demo and the benchmarks see it: where its doors are, and how adapters get in."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from infra.home import supervisor_pid
from infra.operator_key import operator_key
from infra.state import StackState, read_state
from infra.supervisor import Stack
from replay.operator import Operator, registration
from schemas.adapters import CommandResult, RegisterAdapter
from schemas.topics import ADAPTER_COMMANDS, ADAPTER_RESULTS
from streams.adapters.base_model import base_hash
from streams.adapters.locations import parse_location
from streams.adapters.names import parse_adapter
from streams.adapters.store import S3Settings, open_store
from streams.bus.reader import Reader, Start
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

RESULT_WITHIN_S = 60.0


class StageError(Exception):
    """There is no stack to work with, or it refused what the scene needs."""


@dataclass(frozen=True)
class Stage:
    """`environment` is what the stack's own processes were given; it holds secrets."""

    home: Path
    url: str
    internal_url: str
    environment: dict[str, str]
    operator_key: str

    @classmethod
    def of(cls, home: Path, stack: Stack, gateway: int = 0) -> "Stage":
        """The stage of a stack that this process runs, seen through one of its gateways."""
        urls = stack.gateway_urls[gateway], stack.internal_urls[gateway]
        return cls(home, *urls, stack.environment, stack.operator_key)

    @classmethod
    def running(cls, home: Path) -> "Stage":
        """The stage of the stack that runs in `home`. Raises StageError."""
        state = read_state(home)
        if state is None or not supervisor_pid(home):
            raise StageError(f"no stack runs in {home}: start one with `lorafleet up`")
        return cls(home, state.gateway_urls[0], state.internal_urls[0], state.environment, operator_key(home))

    def operator(self) -> Operator:
        return Operator(self.internal_url, self.operator_key)

    @property
    def model(self) -> Path:
        return Path(self.environment["LORAFLEET_MODEL"])

    @property
    def kafka(self) -> KafkaSettings:
        return KafkaSettings.from_env(self.environment)

    def state(self) -> StackState:
        """The supervisor's newest word on its parts. Raises StageError."""
        state = read_state(self.home)
        if state is None:
            raise StageError(f"{self.home} has no state")
        return state

    async def upload(self, folder: Path, adapter_id: str) -> RegisterAdapter:
        """Puts a PEFT folder where pipelines put theirs; returns the command that registers it."""
        root = parse_location(self.environment["LORAFLEET_SOURCES"].split(",")[0])
        place = root.under("canaries", adapter_id.replace("/", "--"))
        command = registration(
            folder, adapter_id, await asyncio.to_thread(base_hash, self.model), str(place.under(WEIGHTS))
        )
        store = open_store(root, S3Settings.from_env(self.environment))
        for name, checksum in ((WEIGHTS, command.checksum), (CONFIG, "")):
            await asyncio.to_thread(store.put, folder / name, place.under(name), checksum)
        return command

    async def command(self, command: RegisterAdapter) -> CommandResult:
        """Registers as a pipeline does that speaks Kafka: one record in, one record out. Raises StageError."""
        kafka = self.kafka
        results: dict[int, Start] = dict.fromkeys(range(kafka.partitions(ADAPTER_RESULTS)), "end")
        async with Reader(kafka, {ADAPTER_RESULTS: results}, "pipeline") as reader, Writer(kafka, "pipeline") as writer:
            await writer.send(ADAPTER_COMMANDS, command, key=parse_adapter(command.adapter_id).customer)
            async with asyncio.timeout(RESULT_WITHIN_S):
                async for records in reader:
                    for record in records:
                        if record.value.command_id == command.command_id:
                            result: CommandResult = record.value
                            if result.status not in (200, 201):
                                raise StageError(f"{command.adapter_id}: {result.status} {result.refusals}")
                            return result
        raise StageError(f"{command.adapter_id}: no result")


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
