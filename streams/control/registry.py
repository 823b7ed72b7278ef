"""What a command does to the tables. Pure: state and command in, one record at most and the result out.

All commands of a customer come in the log's order from one partition, and each row carries the partition and offset of
the command that decided it. So a command at or before the newest offset that decided any row of its partition has been
dealt with: delivered again (after a crash, or a rebalance), it is answered out of the state and writes nothing. One
behind it wrote nothing before either, and is simply decided once more.
A command for an alias that is sent again under the same id, and so stands twice in the log, is known by the ids that
the alias' row remembers.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

import msgspec

from schemas.adapters import (
    AdapterCommand,
    AdapterRecord,
    AliasRecord,
    CommandResult,
    Refusal,
    RegisterAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.reasons import AdapterStatus
from streams.adapters.names import parse_adapter, parse_alias

REMEMBERED = 20  # commands per alias: as far back as one sent twice is known

V = TypeVar("V", covariant=True)


class Rows(Protocol[V]):
    """A table, or a dict."""

    def get(self, key: str, /) -> V | None: ...

    def items(self) -> Collection[tuple[str, V]]: ...


class State(msgspec.Struct, frozen=True):
    """Both tables, and for each partition of the commands the newest offset that decided a row."""

    adapters: Rows[AdapterRecord]
    aliases: Rows[AliasRecord]
    decided: Mapping[int, int]


class Origin(msgspec.Struct, frozen=True):
    """Where a command stands in the log, and when it is decided."""

    partition: int
    offset: int
    now_unix_ms: int


class Decision(msgspec.Struct, frozen=True):
    """`record` is written first, then the result is sent; None: the tables stay as they are.

    `again`: this is the answer to a command that was dealt with before.
    """

    result: CommandResult
    record: AdapterRecord | AliasRecord | None = None
    again: bool = False


class Compiled(msgspec.Struct, frozen=True):
    """An adapter that passed every check, and the canonical file made of it."""

    content_id: str
    rank: int
    alpha: float
    target_modules: list[str]
    size_bytes: int
    weights_uri: str
    checksum: str


def delivered_again(state: State, command: AdapterCommand, origin: Origin) -> Decision | None:
    """The answer to a command that was dealt with before; None for one that was not."""
    if isinstance(command, SetAlias | RollbackAlias):
        return _alias_again(state, command, origin)
    if origin.offset > state.decided.get(origin.partition, -1):
        return None
    row = state.adapters.get(command.adapter_id)
    if row is not None and isinstance(command, RetireAdapter) and row.status is AdapterStatus.RETIRED:
        return Decision(_about(command, row, 200), again=True)
    if row is not None and isinstance(command, RegisterAdapter) and row.source_checksum == command.checksum:
        return Decision(_about(command, row, 201), again=True)
    message = f"dealt with before, up to offset {state.decided[origin.partition]} of partition {origin.partition}"
    return Decision(_conflict(command, "command_id", message), again=True)


def _alias_again(state: State, command: SetAlias | RollbackAlias, origin: Origin) -> Decision | None:
    row = state.aliases.get(command.alias)
    if row is not None and row.commands[-1:] == [command.command_id]:
        return Decision(_pointed(command, row, 200 if row.previous_adapter_id else 201), again=True)
    if row is not None and command.command_id in row.commands:
        message = f"{command.command_id} moved {command.alias} before; it has moved on since, and stays where it is"
        return Decision(_conflict(command, "command_id", message), again=True)
    newest = state.decided.get(origin.partition, -1)
    if origin.offset > newest:
        return None
    if row is not None and isinstance(command, SetAlias) and row.adapter_id == command.adapter_id:
        return Decision(_pointed(command, row, 200), again=True)
    message = f"dealt with before, up to offset {newest} of partition {origin.partition}"
    return Decision(_conflict(command, "command_id", message), again=True)


def register_retired(state: State, command: RegisterAdapter) -> Decision | None:
    """The refusal of an id that is used up, whatever the file; None for a new or a ready one."""
    row = state.adapters.get(command.adapter_id)
    if row is None or row.status is AdapterStatus.READY:
        return None
    message = f"{command.adapter_id} is {row.status}; versions are not used twice: register a new one"
    return Decision(_conflict(command, "adapter_id", message))


def register(state: State, command: RegisterAdapter, compiled: Compiled, origin: Origin) -> Decision:
    """A registration whose file passed: 201, 200 when it is already so, 409 when the id stands for other content."""
    row = state.adapters.get(command.adapter_id)
    if row is not None:
        if row.content_id == compiled.content_id:
            return Decision(_about(command, row, 200))
        return Decision(
            _conflict(
                command,
                "adapter_id",
                f"{command.adapter_id} stands for the content {row.content_id}, this file is {compiled.content_id}; "
                "versions are immutable: register a new one",
            )
        )
    name = parse_adapter(command.adapter_id)
    record = AdapterRecord(
        adapter_id=command.adapter_id,
        customer=name.customer,
        version=name.version,
        base_model_hash=command.base_model_hash,
        rank=compiled.rank,
        alpha=compiled.alpha,
        target_modules=compiled.target_modules,
        size_bytes=compiled.size_bytes,
        weights_uri=compiled.weights_uri,
        checksum=compiled.checksum,
        source_uri=command.weights_uri,
        source_checksum=command.checksum,
        content_id=compiled.content_id,
        status=AdapterStatus.READY,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
    )
    return Decision(_about(command, record, 201), record)


def retire(state: State, command: RetireAdapter, origin: Origin) -> Decision:
    """Refused while an alias points at the adapter. A retired id is never used again."""
    row = state.adapters.get(command.adapter_id)
    if row is None:
        return Decision(_unknown(command, command.adapter_id))
    if row.status is AdapterStatus.RETIRED:
        return Decision(_about(command, row, 200))
    if pointing := sorted(alias for alias, at in state.aliases.items() if at.adapter_id == command.adapter_id):
        message = f"{', '.join(pointing[:10])} points at {command.adapter_id}; set it to another adapter first"
        return Decision(_conflict(command, "adapter_id", message))
    record = msgspec.structs.replace(
        row,
        status=AdapterStatus.RETIRED,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
    )
    return Decision(_about(command, record, 200), record)


def set_alias(state: State, command: SetAlias, origin: Origin) -> Decision:
    """201 for a new alias, 200 for one that moves or stands so already."""
    alias, name = parse_alias(command.alias), parse_adapter(command.adapter_id)
    if alias.customer != name.customer:
        message = f"{command.adapter_id} is not of customer {alias.customer}, whose alias {command.alias} is"
        return Decision(refused(command, [Refusal("adapter_id", message)]))
    row, adapter = state.aliases.get(command.alias), state.adapters.get(command.adapter_id)
    if row is not None and row.adapter_id == command.adapter_id:
        return Decision(_pointed(command, row, 200))
    if adapter is None:
        return Decision(_unknown(command, command.adapter_id))
    if adapter.status is not AdapterStatus.READY:
        message = f"{command.adapter_id} is {adapter.status}; only a ready adapter can be served"
        return Decision(_conflict(command, "adapter_id", message))
    record = AliasRecord(
        alias=command.alias,
        customer=alias.customer,
        adapter_id=command.adapter_id,
        previous_adapter_id=row.adapter_id if row is not None else "",
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        commands=[*(row.commands if row is not None else []), command.command_id][-REMEMBERED:],
    )
    return Decision(_pointed(command, record, 201 if row is None else 200), record)


def rollback(state: State, command: RollbackAlias, origin: Origin) -> Decision:
    """To the adapter that the alias pointed at before, if there is one and it is still ready."""
    row = state.aliases.get(command.alias)
    if row is None:
        return Decision(_answer(command, 404, [Refusal("alias", f"{command.alias} is not there")]))
    if not row.previous_adapter_id:
        message = f"{command.alias} has pointed at {row.adapter_id} since it was made: there is nothing to go back to"
        return Decision(_conflict(command, "alias", message))
    adapter = state.adapters.get(row.previous_adapter_id)
    if adapter is None or adapter.status is not AdapterStatus.READY:
        status = adapter.status if adapter is not None else "not registered"
        message = f"{row.previous_adapter_id}, where {command.alias} came from, is {status}: set it to a ready one"
        return Decision(_conflict(command, "alias", message))
    to = SetAlias(command.command_id, command.alias, row.previous_adapter_id, command.by)
    return set_alias(state, to, origin)


def refused(command: AdapterCommand, reasons: list[Refusal]) -> CommandResult:
    """422 with every reason; nothing was written and the id is free to try again."""
    return _answer(command, 422, reasons)


def unavailable(command: AdapterCommand, field: str, message: str) -> CommandResult:
    """503: nothing was decided and nothing written; the same command may be sent again."""
    return _answer(command, 503, [Refusal(field, message)])


def failed(command: AdapterCommand) -> CommandResult:
    """500: a fault of the registry's own. Nothing was written."""
    return _answer(command, 500, [Refusal("command", "the registry failed on this command; its log says why")])


def _answer(command: AdapterCommand, status: int, reasons: list[Refusal]) -> CommandResult:
    return CommandResult(
        command_id=command.command_id,
        status=status,
        adapter_id="" if isinstance(command, RollbackAlias) else command.adapter_id,
        alias=command.alias if isinstance(command, SetAlias | RollbackAlias) else "",
        refusals=reasons,
    )


def _conflict(command: AdapterCommand, field: str, message: str) -> CommandResult:
    return _answer(command, 409, [Refusal(field, message)])


def _unknown(command: RetireAdapter | SetAlias, adapter_id: str) -> CommandResult:
    return _answer(command, 404, [Refusal("adapter_id", f"{adapter_id} is not registered")])


def _about(command: RegisterAdapter | RetireAdapter, row: AdapterRecord, status: int) -> CommandResult:
    return CommandResult(command.command_id, status, adapter_id=row.adapter_id, content_id=row.content_id)


def _pointed(command: SetAlias | RollbackAlias, row: AliasRecord, status: int) -> CommandResult:
    return CommandResult(
        command.command_id,
        status,
        adapter_id=row.adapter_id,
        alias=row.alias,
        previous_adapter_id=row.previous_adapter_id,
    )
