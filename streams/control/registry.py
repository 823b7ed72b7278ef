"""What a command does to the tables. Pure: state and command in, one record at most and the result out.

All commands of a customer come in the log's order from one partition, and each row carries the partition and offset of
the command that decided it. So a command at or before the newest offset that decided any row of its partition has been
dealt with: delivered again (after a crash, or a rebalance), it is answered out of the state and writes nothing. One
behind it wrote nothing before either, and is simply decided once more.
What becomes of aliases is in moves.py.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

import msgspec

from schemas.adapters import (
    AdapterCommand,
    AdapterRecord,
    AliasCommand,
    AliasRecord,
    CommandResult,
    QuarantineAdapter,
    Refusal,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    SetAlias,
    VersionCommand,
)
from schemas.reasons import AdapterStatus
from streams.adapters.names import parse_adapter

LONGEST_WHY = 300  # characters: it is told to whoever asks for the adapter

V = TypeVar("V", covariant=True)


class Rows(Protocol[V]):
    """A table, or a dict."""

    def get(self, key: str, /) -> V | None: ...

    def items(self) -> Collection[tuple[str, V]]: ...


class State(msgspec.Struct, frozen=True):
    """Both tables, and for each partition of the commands the newest offset that decided a row.

    `flip_limit_s`: how long a new version may take to be warm.
    """

    adapters: Rows[AdapterRecord]
    aliases: Rows[AliasRecord]
    decided: Mapping[int, int]
    flip_limit_s: float


class Origin(msgspec.Struct, frozen=True):
    """Where a command stands in the log, and when it is decided."""

    partition: int
    offset: int
    now_unix_ms: int


class Decision(msgspec.Struct, frozen=True):
    """`record` is written first, then the result is sent; None: the tables stay as they are.

    `again`: this is the answer to a command that was dealt with before. `replaced`: the result of the flip that was
    pending, whose place this one takes.
    """

    result: CommandResult
    record: AdapterRecord | AliasRecord | None = None
    again: bool = False
    replaced: CommandResult | None = None


class Compiled(msgspec.Struct, frozen=True):
    """An adapter that passed every check, and the canonical file made of it."""

    content_id: str
    rank: int
    alpha: float
    target_modules: list[str]
    size_bytes: int
    weights_uri: str
    checksum: str


def delivered_again(state: State, command: VersionCommand, origin: Origin) -> Decision | None:
    """The answer to a command that was dealt with before; None for one that was not."""
    if origin.offset > state.decided.get(origin.partition, -1):
        return None
    row = state.adapters.get(command.adapter_id)
    if row is not None and row.status is LEADS_TO.get(type(command)):
        return Decision(_about(command, row, 200), again=True)
    if row is not None and isinstance(command, RegisterAdapter) and row.source_checksum == command.checksum:
        return Decision(_about(command, row, 201), again=True)
    return Decision(dealt_with(state, command, origin), again=True)


def register_retired(state: State, command: RegisterAdapter) -> Decision | None:
    """The refusal of an id that is used up, whatever the file; None for a new or a ready one."""
    row = state.adapters.get(command.adapter_id)
    if row is None or row.status is AdapterStatus.READY:
        return None
    message = f"{command.adapter_id} is {row.status}; versions are not used twice: register a new one"
    return Decision(conflict(command, "adapter_id", message))


def register(state: State, command: RegisterAdapter, compiled: Compiled, origin: Origin) -> Decision:
    """A registration whose file passed: 201, 200 when it is already so, 409 when the id stands for other content."""
    row = state.adapters.get(command.adapter_id)
    if row is not None:
        if row.content_id == compiled.content_id:
            return Decision(_about(command, row, 200))
        return Decision(
            conflict(
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
        return Decision(unknown(command, command.adapter_id))
    if row.status is AdapterStatus.RETIRED:
        return Decision(_about(command, row, 200))
    if pointing := sorted(alias for alias, at in state.aliases.items() if command.adapter_id in at.ends):
        message = f"{', '.join(pointing[:10])} points at {command.adapter_id}, or will; set it to another adapter first"
        return Decision(conflict(command, "adapter_id", message))
    return _become(command, row, row.why, origin)


def quarantine(state: State, command: QuarantineAdapter, origin: Origin) -> Decision:
    """Whatever points at it. One that is quarantined already keeps the reason that it has."""
    if not (0 < len(command.why.strip()) <= LONGEST_WHY and command.why.isprintable()):
        message = f"1 to {LONGEST_WHY} printable characters that say why are needed, on one line"
        return Decision(refused(command, [Refusal("why", message)]))
    return _between(state, command, command.why.strip(), origin)


def release(state: State, command: ReleaseAdapter, origin: Origin) -> Decision:
    """It is served again."""
    return _between(state, command, "", origin)


def _between(state: State, command: QuarantineAdapter | ReleaseAdapter, why: str, origin: Origin) -> Decision:
    """Ready and quarantined lead to each other, and neither leads back from retired."""
    row = state.adapters.get(command.adapter_id)
    if row is None:
        return Decision(unknown(command, command.adapter_id))
    if row.status is AdapterStatus.RETIRED:
        return Decision(conflict(command, "adapter_id", f"{command.adapter_id} is retired, and stays so"))
    if row.status is LEADS_TO[type(command)]:
        return Decision(_about(command, row, 200))
    return _become(command, row, why, origin)


def _become(
    command: RetireAdapter | QuarantineAdapter | ReleaseAdapter, row: AdapterRecord, why: str, origin: Origin
) -> Decision:
    record = msgspec.structs.replace(
        row,
        status=LEADS_TO[type(command)],
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        why=why,
    )
    return Decision(_about(command, record, 200), record)


LEADS_TO: dict[type[AdapterCommand], AdapterStatus] = {
    RetireAdapter: AdapterStatus.RETIRED,
    QuarantineAdapter: AdapterStatus.QUARANTINED,
    ReleaseAdapter: AdapterStatus.READY,
}


def refused(command: AdapterCommand, reasons: list[Refusal]) -> CommandResult:
    """422 with every reason; nothing was written and the id is free to try again."""
    return answer(command, 422, reasons)


def unavailable(command: AdapterCommand, field: str, message: str) -> CommandResult:
    """503: nothing was decided and nothing written; the same command may be sent again."""
    return answer(command, 503, [Refusal(field, message)])


def failed(command: AdapterCommand) -> CommandResult:
    """500: a fault of the registry's own. Nothing was written."""
    return answer(command, 500, [Refusal("command", "the registry failed on this command; its log says why")])


def answer(command: AdapterCommand, status: int, reasons: list[Refusal]) -> CommandResult:
    return CommandResult(
        command_id=command.command_id,
        status=status,
        adapter_id=command.adapter_id if isinstance(command, VersionCommand | SetAlias) else "",
        alias=command.alias if isinstance(command, AliasCommand) else "",
        refusals=reasons,
    )


def dealt_with(state: State, command: AdapterCommand, origin: Origin) -> CommandResult:
    """409: it was decided in an earlier life, and what it decided has been decided anew since."""
    newest = state.decided[origin.partition]
    return conflict(command, "command_id", f"dealt with before, up to offset {newest} of partition {origin.partition}")


def conflict(command: AdapterCommand, field: str, message: str) -> CommandResult:
    return answer(command, 409, [Refusal(field, message)])


def unknown(command: AdapterCommand, adapter_id: str) -> CommandResult:
    return answer(command, 404, [Refusal("adapter_id", f"{adapter_id} is not registered")])


def _about(command: AdapterCommand, row: AdapterRecord, status: int) -> CommandResult:
    return CommandResult(command.command_id, status, adapter_id=row.adapter_id, content_id=row.content_id)
