"""Handles one command after the other: decide, write the record, then its event, then send the result.

Owns the rows of `adapters` and `aliases`; nobody else writes them. Its state is those topics themselves: before it
decides, it has applied everything written so far (by another registry before a rebalance, too), and after it wrote it
waits for its own record. Ordering: one command at a time, as the log has them; a record before its result.
A crash at any point: the command is delivered again and is either decided anew or answered out of the state.
While Kafka is away it waits. While the store is away a registration is tried for STORE_PATIENCE_S, then answered 503.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from schemas.adapters import (
    AdapterCommand,
    AdapterRecord,
    AliasCommand,
    AliasRecord,
    CommandResult,
    QuarantineAdapter,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    SetAlias,
    VersionCommand,
)
from schemas.customers import Customer
from schemas.topics import ADAPTER_EVENTS, ADAPTER_RESULTS, ADAPTERS, ALIASES, CUSTOMERS, Topic
from streams.adapters.names import InvalidName, parse_adapter, parse_alias
from streams.adapters.refusals import Refusals
from streams.adapters.store import StoreError
from streams.bus.errors import BusUnavailable
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.bus.writer import Writer, Written
from streams.control import moves, registry
from streams.control.commands import BadCommand, read_command
from streams.control.compiler import Compiler
from streams.control.events import event_of
from streams.control.registry import Decision, Origin, State

log = logging.getLogger(__name__)

STORE_PATIENCE_S = 10.0
RETRY_S = (0.2, 2.0)
T = TypeVar("T")


class Registrar:
    """`reader` and `writer` are started and stopped by whoever makes it. `scratch`: a folder of its own."""

    def __init__(
        self,
        settings: KafkaSettings,
        writer: Writer,
        compiler: Compiler,
        scratch: Path,
        on_alias: Callable[[Change[AliasRecord]], None],
        flip_limit_s: float,
    ) -> None:
        self._decided: dict[int, int] = {}
        self._on_alias = on_alias
        self.adapters = Table[AdapterRecord](ADAPTERS, self._note)
        self.aliases = Table[AliasRecord](ALIASES, self._note_alias)
        self._customers = Table[Customer](CUSTOMERS)
        self.reader = TableReader(
            settings, [self.adapters, self.aliases, self._customers], "registry tables", fetch_wait_ms=50
        )
        self._state = State(self.adapters, self.aliases, self._decided, flip_limit_s)
        self._writer = writer
        self._compiler = compiler
        self._scratch = scratch
        # Two: while one waits for the store, the loop's other calls still find a thread.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="compile")

    async def handle(self, key: bytes | None, raw: bytes | None, partition: int, offset: int) -> None:
        """One record of `adapter-commands`. Returns when its result is written; raises only if cancelled."""
        try:
            command = read_command(raw or b"")
        except BadCommand as error:
            log.warning("command at %d@%d refused: %s", partition, offset, error)
            if error.command_id:
                await self._send(CommandResult(error.command_id, 422, refusals=error.refusals.found))
            return
        origin = Origin(partition, offset, time.time_ns() // 1_000_000)
        await _until_kafka_answers(self.reader.barrier)
        try:
            decision = await self._decide(command, key, origin)
        except Exception:
            log.exception("command %s at %d@%d", command.command_id, partition, offset)
            decision = Decision(registry.failed(command))
        result = decision.result
        customer = _customer(command, key)
        event = event_of(self._state, customer, command, decision, origin) if customer else None
        if decision.record is not None:
            topic, row_key = _place(decision.record)
            written = await self._write(topic, decision.record, row_key)
            result = msgspec.structs.replace(
                result, table=topic.name, partition=written.partition, offset=written.offset
            )
        if event is not None:
            happened = event
            await _until_kafka_answers(lambda: self._writer.send(ADAPTER_EVENTS, happened, key=customer))
        if decision.replaced is not None:
            await self._send(decision.replaced)
        await self._send(result)
        log.info(
            "%s %s: %d %s",
            type(command).__name__,
            command.alias if isinstance(command, AliasCommand) else command.adapter_id,
            result.status,
            "; ".join(f"{reason.field}: {reason.message}" for reason in result.refusals),
        )

    async def _decide(self, command: AdapterCommand, key: bytes | None, origin: Origin) -> Decision:
        refusals = _check_names(command, key)
        if not isinstance(command, RegisterAdapter):
            if refusals:
                return Decision(registry.refused(command, refusals.found))
            if isinstance(command, AliasCommand):
                return moves.decide(self._state, command, origin)
            if (again := registry.delivered_again(self._state, command, origin)) is not None:
                return again
            match command:
                case RetireAdapter():
                    return registry.retire(self._state, command, origin)
                case QuarantineAdapter():
                    return registry.quarantine(self._state, command, origin)
                case ReleaseAdapter():
                    return registry.release(self._state, command, origin)
        settled = registry.delivered_again(self._state, command, origin)
        settled = settled or registry.register_retired(self._state, command)
        if settled is not None:
            return settled
        self._check_customer(command, refusals)
        return await self._register(command, refusals, origin)

    def _check_customer(self, command: RegisterAdapter, refusals: Refusals) -> None:
        """That there is one: the adapter of a customer that was never made could be asked for by nobody."""
        with contextlib.suppress(InvalidName):  # which is told already
            customer = parse_adapter(command.adapter_id).customer
            if self._customers.get(customer) is None:
                fix = f"PUT /internal/customers/{customer} makes it"
                refusals.add("adapter_id", f"{command.adapter_id}: there is no customer {customer}; {fix}")

    async def _register(self, command: RegisterAdapter, refusals: Refusals, origin: Origin) -> Decision:
        with tempfile.TemporaryDirectory(dir=self._scratch) as name:
            folder = Path(name)
            try:
                compiled = await self._patiently(lambda: self._compiler.compile(command, folder))
            except (StoreError, OSError) as error:
                return Decision(registry.unavailable(command, "weights_uri", _told(error)))
            if isinstance(compiled, Refusals) or refusals:
                if isinstance(compiled, Refusals):
                    refusals.take(compiled)
                return Decision(registry.refused(command, refusals.found))
            decision = registry.register(self._state, command, compiled, origin)
            if decision.record is not None:
                try:
                    await self._patiently(lambda: self._compiler.upload(compiled, folder))
                except (StoreError, OSError) as error:
                    return Decision(registry.unavailable(command, "store", _told(error)))
            return decision

    async def _patiently(self, work: Callable[[], T]) -> T:
        """Runs it in a thread, again and again while the store or the disk fails, for STORE_PATIENCE_S."""
        loop, end_s, pause_s = asyncio.get_running_loop(), time.monotonic() + STORE_PATIENCE_S, RETRY_S[0]
        while True:
            try:
                return await loop.run_in_executor(self._threads, work)
            except (StoreError, OSError) as error:
                if time.monotonic() + pause_s > end_s:
                    raise
                log.warning("tried again in %g s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    async def _write(self, topic: Topic, record: AdapterRecord | AliasRecord, key: str) -> Written:
        """A record of unknown fate is written again: twice the same row is harmless, none is not."""
        written = await _until_kafka_answers(lambda: self._writer.send(topic, record, key=key))
        await _until_kafka_answers(lambda: self.reader.applied(topic, written.partition, written.offset))
        return written

    async def _send(self, result: CommandResult) -> None:
        await _until_kafka_answers(lambda: self._writer.send(ADAPTER_RESULTS, result, key=result.command_id))

    def _note(self, change: Change[AdapterRecord] | Change[AliasRecord]) -> None:
        if (row := change.value) is not None:
            known = self._decided.get(row.command_partition, -1)
            self._decided[row.command_partition] = max(known, row.command_offset)

    def _note_alias(self, change: Change[AliasRecord]) -> None:
        self._note(change)
        self._on_alias(change)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _check_names(command: AdapterCommand, key: bytes | None) -> Refusals:
    """The names' form, and that the record's key is the customer whose names they are: it decides the one writer."""
    refusals, customers = Refusals(), set()
    if isinstance(command, VersionCommand | SetAlias):
        try:
            customers.add(parse_adapter(command.adapter_id).customer)
        except InvalidName as error:
            refusals.add("adapter_id", str(error))
    if isinstance(command, AliasCommand):
        try:
            customers = {parse_alias(command.alias).customer}
        except InvalidName as error:
            refusals.add("alias", str(error))
    for customer in customers:
        if key != customer.encode():
            refusals.add("key", f"{key!r}: the record's key must be the customer id, {customer!r}")
    return refusals


def _customer(command: AdapterCommand, key: bytes | None) -> str:
    """Whose history the command belongs to; empty where its names do not say so, or the record's key says otherwise."""
    try:
        if isinstance(command, AliasCommand):
            customer = parse_alias(command.alias).customer
        else:
            customer = parse_adapter(command.adapter_id).customer
    except InvalidName:
        return ""
    return customer if key == customer.encode() else ""


def _told(error: StoreError | OSError) -> str:
    """What a pipeline may read of it: not where this machine keeps its files."""
    return f"the registry's own disk: {error.strerror}" if isinstance(error, OSError) else str(error)


def _place(record: AdapterRecord | AliasRecord) -> tuple[Topic, str]:
    if isinstance(record, AliasRecord):
        return ALIASES, record.alias
    return ADAPTERS, record.adapter_id


async def _until_kafka_answers(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks until it works: without Kafka there is nothing else to do, and this command must not be lost."""
    while True:
        try:
            return await ask()
        except BusUnavailable as error:
            log.warning("waiting for Kafka: %s", error)
            await asyncio.sleep(RETRY_S[0])
