"""`replica-commands` -> the engine's slots: what an operator, or the control plane, wants of this replica.

Each Load and Unload is answered in the beats (answers.py), when it is known what became of it. Commands do not wait for
each other: a load takes what it takes, a drain waits for attempts. Read from this worker's start on: what was asked of
an earlier holder of the place died with it, and whoever waits for it sees the new incarnation.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from schemas.adapters import AdapterRecord
from schemas.placement import Drain, Load, ReplicaCommand, Unload
from schemas.reasons import AdapterStatus
from schemas.replicas import Answered
from schemas.topics import REPLICA_COMMANDS
from streams.bus.errors import OffsetLost
from streams.bus.reader import Reader
from workers.answers import Answers
from workers.loading import Loading
from workers.unloading import Unloading

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
HEARD_S = 2.0  # the adapter's record may come a little later than the command


class Commands:
    """`drain` makes the worker take nothing new; it stays until it is told to end."""

    def __init__(
        self,
        reader: Reader,
        adapter: Callable[[str], AdapterRecord | None],
        loading: Loading,
        unloading: Unloading,
        answers: Answers,
        drain: Callable[[], None],
    ) -> None:
        self._reader, self._adapter, self._drain = reader, adapter, drain
        self._loading, self._unloading, self._answers = loading, unloading, answers
        self._open: set[asyncio.Task[None]] = set()

    async def obey(self) -> NoReturn:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    records = await self._reader.poll()
                except OffsetLost as lost:
                    log.warning("commands were lost: %s", lost)
                    self._reader.seek(REPLICA_COMMANDS, lost.partition, lost.end)
                    continue
                for record in records:
                    if record.value is not None:
                        self._take(group, record.value)

    def _take(self, group: asyncio.TaskGroup, command: ReplicaCommand) -> None:
        log.info("command %s", command)
        if isinstance(command, Drain):
            self._drain()
        elif len(self._open) >= MOST_AT_ONCE:
            self._answers.give(command.command_id, Answered.FAILED, f"{MOST_AT_ONCE} commands are being carried out")
        else:
            task = group.create_task(self._do(command), name=f"command {command.command_id}")
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _do(self, command: Load | Unload) -> None:
        name, record = command.command_id, await self._known(command.adapter_id)
        if record is None:
            self._answers.give(name, Answered.FAILED, f"adapter {command.adapter_id} is not known here")
        elif isinstance(command, Unload):
            self._answers.give(name, *await self._unloading.unload(record, command.drain_s))
        elif record.status is not AdapterStatus.READY:
            self._answers.give(name, Answered.FAILED, f"{record.adapter_id} is {record.status}", lasting=True)
        elif (failure := await self._loading.loaded(record)) is not None:
            self._answers.give(name, Answered.FAILED, failure.reason, failure.lasting)
        else:
            self._answers.give(name, Answered.DONE)

    async def _known(self, adapter_id: str) -> AdapterRecord | None:
        end = time.monotonic() + HEARD_S
        while (record := self._adapter(adapter_id)) is None and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return record
