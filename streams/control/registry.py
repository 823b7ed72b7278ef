"""What a command does to the tables. Pure: state and command in, one record at most and the result out.

All commands of a customer come in the log's order from one partition, and each row carries the partition and offset of
the command that decided it. So a command at or before the newest offset that decided any row of its partition has been
dealt with: delivered again (after a crash, or a rebalance), it is answered out of the state and writes nothing. One
behind it wrote nothing before either, and is simply decided once more.
A command for an alias that is sent again under the same id, and so stands twice in the log, is known by the ids that
the alias' row remembers.

An alias that is new points at once: there is nothing to serve instead. One that moves is first only meant to: its row
gets a pending flip, which whoever runs warms up (deployer.py) and then concludes, by a command of its own in the same
log. So a flip is decided like everything else about its customer, in the log's order and by one writer; a registry
that dies leaves a row that says all its successor needs; whichever command comes later replaces the flip; a conclusion
that comes twice, or too late, finds another row and does nothing. A rollback while a flip is pending calls it off: had
the flip come first, the rollback would have led to the same adapter. A rollback that does not get warm in time moves
all the same, cold: it is away from something, and waiting does not make that better. A retired or quarantined adapter
is never moved to. An alias that points at one when it is quarantined stays, and what it serves is refused until the
adapter is released or the alias moved: to serve something else instead is not the registry's to choose.
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
    ConcludeFlip,
    PendingFlip,
    QuarantineAdapter,
    Refusal,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.reasons import AdapterStatus
from streams.adapters.names import parse_adapter, parse_alias

ROLLBACK_LIMIT_S = 5.0
LONGEST_WHY = 300  # characters: it is told to whoever asks for the adapter
REMEMBERED = 20  # commands per alias: as far back as one sent twice is known

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


def delivered_again(state: State, command: AdapterCommand, origin: Origin) -> Decision | None:
    """The answer to a command that was dealt with before; None for one that was not."""
    if isinstance(command, ConcludeFlip):
        return None  # known by what is pending
    if isinstance(command, SetAlias | RollbackAlias):
        return _alias_again(state, command, origin)
    if origin.offset > state.decided.get(origin.partition, -1):
        return None
    row = state.adapters.get(command.adapter_id)
    if row is not None and row.status is LEADS_TO.get(type(command)):
        return Decision(_about(command, row, 200), again=True)
    if row is not None and isinstance(command, RegisterAdapter) and row.source_checksum == command.checksum:
        return Decision(_about(command, row, 201), again=True)
    message = f"dealt with before, up to offset {state.decided[origin.partition]} of partition {origin.partition}"
    return Decision(_conflict(command, "command_id", message), again=True)


def _alias_again(state: State, command: SetAlias | RollbackAlias, origin: Origin) -> Decision | None:
    row = state.aliases.get(command.alias)
    if row is not None and row.pending is not None and row.pending.command_id == command.command_id:
        return Decision(_waits(row, row.pending), again=True)
    if row is not None and row.commands[-1:] == [command.command_id]:
        made = row.commands == [command.command_id] and not row.previous_adapter_id
        return Decision(_pointed(command, row, 201 if made else 200), again=True)
    if row is not None and command.command_id in row.commands:
        message = (
            f"{command.command_id} was dealt with before; {command.alias} has moved on since, and stays where it is"
        )
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
    if pointing := sorted(alias for alias, at in state.aliases.items() if command.adapter_id in ends(at)):
        message = f"{', '.join(pointing[:10])} points at {command.adapter_id}, or will; set it to another adapter first"
        return Decision(_conflict(command, "adapter_id", message))
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
        return Decision(_unknown(command, command.adapter_id))
    if row.status is AdapterStatus.RETIRED:
        return Decision(_conflict(command, "adapter_id", f"{command.adapter_id} is retired, and stays so"))
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


def ends(row: AliasRecord) -> tuple[str, ...]:
    """Where the alias points, and where it will."""
    return (row.adapter_id,) if row.pending is None else (row.adapter_id, row.pending.adapter_id)


def set_alias(state: State, command: SetAlias, origin: Origin) -> Decision:
    """201 for a new alias, 202 for one that will move, 200 for one that stands so already."""
    alias, name = parse_alias(command.alias), parse_adapter(command.adapter_id)
    if alias.customer != name.customer:
        message = f"{command.adapter_id} is not of customer {alias.customer}, whose alias {command.alias} is"
        return Decision(refused(command, [Refusal("adapter_id", message)]))
    row, adapter = state.aliases.get(command.alias), state.adapters.get(command.adapter_id)
    if row is not None and row.adapter_id == command.adapter_id:
        return _stay(command, row, origin)
    if adapter is None:
        return Decision(_unknown(command, command.adapter_id))
    if adapter.status is not AdapterStatus.READY:
        message = f"{command.adapter_id} is {adapter.status}; only a ready adapter can be served"
        return Decision(_conflict(command, "adapter_id", message))
    if row is not None:
        return _begin(command, "alias", row, command.adapter_id, state.flip_limit_s, origin)
    record = AliasRecord(
        alias=command.alias,
        customer=alias.customer,
        adapter_id=command.adapter_id,
        previous_adapter_id="",
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        commands=[command.command_id],
    )
    return Decision(_pointed(command, record, 201), record)


def rollback(state: State, command: RollbackAlias, origin: Origin) -> Decision:
    """To the adapter that the alias pointed at before, if there is one and it is still ready."""
    row = state.aliases.get(command.alias)
    if row is None:
        return Decision(_answer(command, 404, [Refusal("alias", f"{command.alias} is not there")]))
    if row.pending is not None:
        return _stay(command, row, origin)
    if not row.previous_adapter_id:
        message = f"{command.alias} has pointed at {row.adapter_id} since it was made: there is nothing to go back to"
        return Decision(_conflict(command, "alias", message))
    adapter = state.adapters.get(row.previous_adapter_id)
    if adapter is None or adapter.status is not AdapterStatus.READY:
        status = adapter.status if adapter is not None else "not registered"
        message = f"{row.previous_adapter_id}, where {command.alias} came from, is {status}: set it to a ready one"
        return Decision(_conflict(command, "alias", message))
    limit_s = min(ROLLBACK_LIMIT_S, state.flip_limit_s)
    return _begin(command, "rollback", row, row.previous_adapter_id, limit_s, origin)


def conclude(state: State, command: ConcludeFlip, origin: Origin) -> Decision:
    """Moves the alias, or leaves it. The result is that of the command that asked for the flip."""
    row, flip = state.aliases.get(command.alias), command.flip
    if row is not None and (row.command_partition, row.command_offset) == (origin.partition, origin.offset):
        return Decision(_concluded(state, command, row), again=True)
    if row is None or row.pending != flip:
        return Decision(CommandResult(command.command_id, 200, alias=command.alias))  # it has been dealt with
    adapter = state.adapters.get(flip.adapter_id)
    moves = command.warm and adapter is not None and adapter.status is AdapterStatus.READY
    record = msgspec.structs.replace(
        row,
        adapter_id=flip.adapter_id if moves else row.adapter_id,
        previous_adapter_id=row.adapter_id if moves else row.previous_adapter_id,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        # The same command may be tried again: this once it came to nothing.
        commands=row.commands if moves else [known for known in row.commands if known != flip.command_id],
        pending=None,
    )
    return Decision(_concluded(state, command, record), record)


def _begin(
    command: SetAlias | RollbackAlias, name: str, row: AliasRecord, adapter_id: str, limit_s: float, origin: Origin
) -> Decision:
    flip = PendingFlip(
        adapter_id=adapter_id,
        command=name,
        command_id=command.command_id,
        by=command.by,
        deadline_unix_ms=origin.now_unix_ms + int(1000 * limit_s),
        command_partition=origin.partition,
        command_offset=origin.offset,
    )
    record = _now(row, command, flip, origin)
    return Decision(_waits(record, flip), record, replaced=_replaced(row, command))


def _stay(command: SetAlias | RollbackAlias, row: AliasRecord, origin: Origin) -> Decision:
    """The alias points there already; what it waits for is called off."""
    if row.pending is None:
        return Decision(_pointed(command, row, 200))
    record = _now(row, command, None, origin)
    return Decision(_pointed(command, record, 200), record, replaced=_replaced(row, command))


def _now(
    row: AliasRecord, command: SetAlias | RollbackAlias, pending: PendingFlip | None, origin: Origin
) -> AliasRecord:
    return msgspec.structs.replace(
        row,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        commands=[*row.commands, command.command_id][-REMEMBERED:],
        pending=pending,
    )


def _replaced(row: AliasRecord, command: SetAlias | RollbackAlias) -> CommandResult | None:
    flip = row.pending
    if flip is None or flip.command_id == command.command_id:
        return None
    message = f"{command.command_id} came before {flip.adapter_id} was warm, and took its place"
    refusals = [Refusal("alias", message)]
    return CommandResult(flip.command_id, 409, adapter_id=row.adapter_id, alias=row.alias, refusals=refusals)


def _waits(row: AliasRecord, flip: PendingFlip) -> CommandResult:
    return CommandResult(
        flip.command_id,
        202,
        adapter_id=row.adapter_id,
        alias=row.alias,
        previous_adapter_id=row.previous_adapter_id,
        pending_adapter_id=flip.adapter_id,
    )


def _concluded(state: State, command: ConcludeFlip, row: AliasRecord) -> CommandResult:
    flip = command.flip
    if row.adapter_id == flip.adapter_id:
        return CommandResult(
            flip.command_id,
            200,
            adapter_id=row.adapter_id,
            alias=row.alias,
            previous_adapter_id=row.previous_adapter_id,
        )
    adapter = state.adapters.get(flip.adapter_id)
    why = command.why or f"{flip.adapter_id} is {adapter.status if adapter is not None else 'not registered'}"
    return CommandResult(
        flip.command_id,
        504,
        adapter_id=row.adapter_id,
        alias=row.alias,
        previous_adapter_id=row.previous_adapter_id,
        refusals=[Refusal("alias", f"{row.alias} stays at {row.adapter_id}: {why}")],
    )


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
        adapter_id="" if isinstance(command, RollbackAlias | ConcludeFlip) else command.adapter_id,
        alias=command.alias if isinstance(command, AliasCommand) else "",
        refusals=reasons,
    )


def _conflict(command: AdapterCommand, field: str, message: str) -> CommandResult:
    return _answer(command, 409, [Refusal(field, message)])


def _unknown(command: AdapterCommand, adapter_id: str) -> CommandResult:
    return _answer(command, 404, [Refusal("adapter_id", f"{adapter_id} is not registered")])


def _about(command: AdapterCommand, row: AdapterRecord, status: int) -> CommandResult:
    return CommandResult(command.command_id, status, adapter_id=row.adapter_id, content_id=row.content_id)


def _pointed(command: SetAlias | RollbackAlias, row: AliasRecord, status: int) -> CommandResult:
    return CommandResult(
        command.command_id,
        status,
        adapter_id=row.adapter_id,
        alias=row.alias,
        previous_adapter_id=row.previous_adapter_id,
    )
