"""Replicas that say beats and obey commands, without a worker: what a registry sees of a fleet."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec

from schemas.placement import Load, Unload
from schemas.replicas import Answer, ReplicaBeat, ReplicaClaim, ReplicaStatus, Residency
from schemas.tokens import LoadReport
from schemas.topics import REPLICA_COMMANDS, REPLICAS
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

BEAT_S = 0.3


class Replica:
    """Loads at once what it is told to, unless it is `stuck` or `fails`."""

    def __init__(self, place: int, base_hash: str) -> None:
        self.place, self.base_hash, self.stuck = place, base_hash, False
        self.fails: Answer | None = None  # its answer to every Load
        self.answers: list[Answer] = []
        self.slots: list[str] = []
        self.wishes: list[Load | Unload] = []

    @contextlib.asynccontextmanager
    async def lives(self, settings: KafkaSettings, writer: Writer) -> AsyncIterator["Replica"]:
        async with Reader(settings, {REPLICA_COMMANDS: {self.place: "end"}}, f"replica {self.place}") as reader:
            claim = ReplicaClaim(self.place, "n", 0, self.base_hash, "", 0)
            written = await writer.send(REPLICAS, claim, key=str(self.place))
            tasks = [asyncio.create_task(self._beat(writer, written.offset)), asyncio.create_task(self._obey(reader))]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _beat(self, writer: Writer, incarnation: int) -> None:
        for number in range(1 << 30):
            beat = ReplicaBeat(
                replica=self.place,
                incarnation=incarnation,
                start_offset=0,
                beat=number,
                status=ReplicaStatus.READY,
                step=number,
                load=LoadReport(0, 0, 0, 0),
                residency=Residency(gpu_adapters=list(self.slots)),
                base_hash=self.base_hash,
                numeric_class="",
                capacity_tokens=1,
                at_unix_ms=time.time_ns() // 1_000_000,
                answers=list(self.answers),
            )
            await writer.send(REPLICAS, beat, key=str(self.place))
            await asyncio.sleep(BEAT_S)

    async def _obey(self, reader: Reader) -> None:
        async for records in reader:
            for record in records:
                command = record.value
                self.wishes.append(command)
                if isinstance(command, Load) and self.fails is not None:
                    self.answers.append(msgspec.structs.replace(self.fails, command_id=command.command_id))
                elif isinstance(command, Load) and not self.stuck and command.adapter_id not in self.slots:
                    self.slots.append(command.adapter_id)
                if isinstance(command, Unload) and command.adapter_id in self.slots:
                    self.slots.remove(command.adapter_id)
