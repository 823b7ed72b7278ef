"""Commands to the registry, and its answers: topics `adapter-commands` and `adapter-results`.

Owns the reader of results, which starts at the end, before any command is sent. The registry decides in the order of a
customer's commands; nothing is decided here. A crash forgets who waits; what the registry decided stands.
"""

import asyncio
import contextlib
import logging
import time
from typing import NoReturn

from gateway.errors import ApiError
from gateway.tables import Tables
from schemas.adapters import AdapterCommand, CommandResult
from schemas.topics import ADAPTER_COMMANDS, ADAPTER_RESULTS, ADAPTERS, ALIASES, Topic
from streams.bus.errors import BusUnavailable, MaybeWritten, OffsetLost
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

log = logging.getLogger(__name__)

SEND_LIMIT_S = 5.0
CONFIRM_S = 15.0  # longer than a dead gateway is waited for
RESULT_LIMIT_S = 60.0  # a registration reads the whole file, and writes one
ACCEPTED = 202
TABLES = {topic.name: topic for topic in (ADAPTERS, ALIASES)}
REASONS = {404: "not_found", 409: "conflict", 422: "refused", 503: "store", 504: "not_warm"}


class Registrar:
    def __init__(self, kafka: KafkaSettings, writer: Writer, tables: Tables) -> None:
        self._writer, self._tables = writer, tables
        self._reader = Reader(
            kafka, {ADAPTER_RESULTS: dict.fromkeys(range(kafka.partitions(ADAPTER_RESULTS)), "end")}, "command results"
        )
        # A caller may send one change twice at once: whoever waits for its id hears every answer.
        self._waiting: dict[str, set[asyncio.Queue[CommandResult]]] = {}

    async def run(self) -> NoReturn:
        async with self._reader:
            while True:
                try:
                    records = await self._reader.poll()
                except OffsetLost as lost:
                    self._reader.seek(ADAPTER_RESULTS, lost.partition, lost.end)
                    continue
                for record in records:
                    for waiter in self._waiting.get(record.key or "", ()):
                        if record.value is not None:
                            waiter.put_nowait(record.value)

    async def decide(self, customer: str, command: AdapterCommand, wait_s: float = RESULT_LIMIT_S) -> CommandResult:
        """The registry's answer to an accepted command, once every live gateway has applied what it wrote.

        One that is still to be carried out (202) is waited for, `wait_s` in all; then it is the answer.
        Raises ApiError: 404, 409, 422 with every reason; 503 where it was not sent, or its adapter did not get warm;
        504 where nobody can tell yet.
        """
        result = await self._result(customer, command, wait_s)
        if result.status not in (200, 201, 202):
            message = "; ".join(f"{refusal.field}: {refusal.message}" for refusal in result.refusals)
            param = result.refusals[0].field if result.refusals else None
            raise ApiError(REASONS.get(result.status, "internal"), message or "refused", param, result.refusals)
        if result.offset >= 0:
            await confirmed(self._tables, TABLES[result.table], result.partition, result.offset)
        return result

    async def _result(self, customer: str, command: AdapterCommand, wait_s: float) -> CommandResult:
        answers: asyncio.Queue[CommandResult] = asyncio.Queue()
        waiting = self._waiting.setdefault(command.command_id, set())
        waiting.add(answers)
        end = time.monotonic() + wait_s
        try:
            try:
                await self._writer.send(ADAPTER_COMMANDS, command, key=customer, timeout_s=SEND_LIMIT_S)
            except MaybeWritten as error:
                log.warning("command %s: %s", command.command_id, error)
            except BusUnavailable as error:
                raise ApiError("broker", f"the command was not sent: {error}") from None
            result = await asyncio.wait_for(answers.get(), RESULT_LIMIT_S)
            with contextlib.suppress(TimeoutError):
                while result.status == ACCEPTED and (left_s := end - time.monotonic()) > 0:
                    result = await asyncio.wait_for(answers.get(), left_s)
            return result
        except TimeoutError:
            raise ApiError(
                "unconfirmed",
                f"the registry did not answer within {RESULT_LIMIT_S:g} s; it may still carry the command out, and the "
                "same call again tells",
            ) from None
        finally:
            waiting.discard(answers)
            if not waiting:
                self._waiting.pop(command.command_id, None)


async def confirmed(tables: Tables, topic: Topic, partition: int, offset: int) -> None:
    """Waits until every live gateway has applied the record. Raises ApiError (504)."""
    if behind := await tables.everywhere(topic, partition, offset, CONFIRM_S):
        raise ApiError("unconfirmed", f"it is decided, but gateways {behind} have not said yet that they know of it")
