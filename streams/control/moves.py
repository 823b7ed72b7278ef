"""What a command for an alias does to its row: it points elsewhere, or tries another version. Pure.

A command that is sent again under the same id, and so stands twice in the log, is known by the ids that the row
remembers; one that is only delivered again, as in registry.py.

An alias that is new points at once: there is nothing to serve instead. One that moves is first only meant to: its row
gets a pending flip, which whoever runs warms up (deployer.py) and then concludes, by a command of its own in the same
log. So a flip is decided like everything else about its customer, in the log's order and by one writer; a registry
that dies leaves a row that says all its successor needs; whichever command comes later replaces the flip; a conclusion
that comes twice, or too late, finds another row and does nothing. A rollback while a flip is pending calls it off: had
the flip come first, the rollback would have led to the same adapter. A rollback that does not get warm in time moves
all the same, cold: it is away from something, and waiting does not make that better. A retired or quarantined adapter
is never moved to. An alias that points at one when it is quarantined stays, and what it serves is refused until the
adapter is released or the alias moved: to serve something else instead is not the registry's to choose.

A share of an alias' conversations begins like a move, with a flip that is warmed up, and ends in a trial: the alias
stays, and its row names the version beside it and the share (gateway/catalogue.py draws the conversations). A trial
ends when the alias moves, when a command for it asks for the whole of what it points at, by a rollback, or, once it
has failed (trials.py), by a command of the registry's own. Another share for the version on trial needs no warming up.
"""

import msgspec

from schemas.adapters import (
    AliasCommand,
    AliasRecord,
    CommandResult,
    ConcludeFlip,
    EndTrial,
    PendingFlip,
    Refusal,
    RollbackAlias,
    SetAlias,
    Trial,
)
from schemas.reasons import AdapterStatus
from streams.adapters.names import parse_adapter, parse_alias
from streams.control.registry import Decision, Origin, State, answer, conflict, dealt_with, refused, unknown

ROLLBACK_LIMIT_S = 5.0
REMEMBERED = 20  # commands per alias: as far back as one sent twice is known


def decide(state: State, command: AliasCommand, origin: Origin) -> Decision:
    """Of a command whose names are in order."""
    match command:
        case SetAlias():
            return _again(state, command, origin) or _set(state, command, origin)
        case RollbackAlias():
            return _again(state, command, origin) or _rollback(state, command, origin)
        case ConcludeFlip():
            return _conclude(state, command, origin)
        case EndTrial():
            return _end_trial(state, command, origin)


def _again(state: State, command: SetAlias | RollbackAlias, origin: Origin) -> Decision | None:
    """The answer to a command that was dealt with before; None for one that was not."""
    row = state.aliases.get(command.alias)
    if row is not None and row.pending is not None and row.pending.command_id == command.command_id:
        return Decision(_standing(row, command.command_id, 202), again=True)
    if row is not None and row.commands[-1:] == [command.command_id]:
        made = row.commands == [command.command_id] and not row.previous_adapter_id
        return Decision(_standing(row, command.command_id, 201 if made else 200), again=True)
    if row is not None and command.command_id in row.commands:
        message = (
            f"{command.command_id} was dealt with before; {command.alias} has moved on since, and stays where it is"
        )
        return Decision(conflict(command, "command_id", message), again=True)
    if origin.offset > state.decided.get(origin.partition, -1):
        return None
    if row is not None and isinstance(command, SetAlias) and row.adapter_id == command.adapter_id:
        return Decision(_standing(row, command.command_id, 200), again=True)
    return Decision(dealt_with(state, command, origin), again=True)


def _set(state: State, command: SetAlias, origin: Origin) -> Decision:
    """201 for a new alias, 202 for one that will move, 200 for one that stands so already."""
    alias, name = parse_alias(command.alias), parse_adapter(command.adapter_id)
    if alias.customer != name.customer:
        message = f"{command.adapter_id} is not of customer {alias.customer}, whose alias {command.alias} is"
        return Decision(refused(command, [Refusal("adapter_id", message)]))
    if not 0 < command.share <= 1:
        message = f"{command.share:g} is no share: give one above 0, and 1 for all of the traffic"
        return Decision(refused(command, [Refusal("share", message)]))
    row, adapter = state.aliases.get(command.alias), state.adapters.get(command.adapter_id)
    if (impossible := _no_share(command, row)) is not None:
        return Decision(conflict(command, "share", impossible))
    if row is not None and row.adapter_id == command.adapter_id:
        return _stay(command, row, origin)
    if adapter is None:
        return Decision(unknown(command, command.adapter_id))
    if adapter.status is not AdapterStatus.READY:
        message = f"{command.adapter_id} is {adapter.status}; only a ready adapter can be served"
        return Decision(conflict(command, "adapter_id", message))
    if row is not None and command.share < 1 and row.trial is not None and row.trial.adapter_id == command.adapter_id:
        return _share(command, row, row.trial, origin)
    if row is not None:
        return _begin(command, "alias", row, command.adapter_id, state.flip_limit_s, origin, command.share)
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
    return Decision(_standing(record, command.command_id, 201), record)


def _no_share(command: SetAlias, row: AliasRecord | None) -> str | None:
    """Why a share cannot be taken, if so."""
    if command.share == 1:
        return None
    if row is None:
        return f"{command.alias} is not there, and nothing would serve the rest: make it first, without a share"
    if row.adapter_id == command.adapter_id:
        return f"{command.alias} points at {command.adapter_id} already, which serves all that no trial takes"
    return None


def _rollback(state: State, command: RollbackAlias, origin: Origin) -> Decision:
    """To the adapter that the alias pointed at before, if there is one and it is still ready."""
    row = state.aliases.get(command.alias)
    if row is None:
        return Decision(answer(command, 404, [Refusal("alias", f"{command.alias} is not there")]))
    if row.pending is not None or row.trial is not None:
        return _stay(command, row, origin)
    if not row.previous_adapter_id:
        message = f"{command.alias} has pointed at {row.adapter_id} since it was made: there is nothing to go back to"
        return Decision(conflict(command, "alias", message))
    adapter = state.adapters.get(row.previous_adapter_id)
    if adapter is None or adapter.status is not AdapterStatus.READY:
        status = adapter.status if adapter is not None else "not registered"
        message = f"{row.previous_adapter_id}, where {command.alias} came from, is {status}: set it to a ready one"
        return Decision(conflict(command, "alias", message))
    limit_s = min(ROLLBACK_LIMIT_S, state.flip_limit_s)
    return _begin(command, "rollback", row, row.previous_adapter_id, limit_s, origin)


def _conclude(state: State, command: ConcludeFlip, origin: Origin) -> Decision:
    """Moves the alias, begins its trial, or leaves it. The result is that of the command that asked for the flip."""
    row, flip = state.aliases.get(command.alias), command.flip
    if row is not None and (row.command_partition, row.command_offset) == (origin.partition, origin.offset):
        return Decision(_concluded(state, command, row), again=True)
    if row is None or row.pending != flip:
        return Decision(answer(command, 200, []))  # it has been dealt with
    adapter = state.adapters.get(flip.adapter_id)
    goes = command.warm and adapter is not None and adapter.status is AdapterStatus.READY
    moves = goes and flip.share == 1
    tried = Trial(flip.adapter_id, flip.share, flip.command_id, flip.by, origin.now_unix_ms) if goes else row.trial
    record = msgspec.structs.replace(
        row,
        adapter_id=flip.adapter_id if moves else row.adapter_id,
        previous_adapter_id=row.adapter_id if moves else row.previous_adapter_id,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        # The same command may be tried again: this once it came to nothing.
        commands=row.commands if goes else [known for known in row.commands if known != flip.command_id],
        pending=None,
        trial=None if moves else tried,
    )
    return Decision(_concluded(state, command, record), record)


def _end_trial(state: State, command: EndTrial, origin: Origin) -> Decision:
    """The alias stays. A flip to the version that has failed goes with its trial."""
    row = state.aliases.get(command.alias)
    if row is None:
        return Decision(answer(command, 200, []))
    if row.trial is None or row.trial != command.trial:
        return Decision(_standing(row, command.command_id, 200))  # it has been dealt with
    failed = row.pending is not None and row.pending.adapter_id == row.trial.adapter_id
    record = msgspec.structs.replace(
        row,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        pending=None if failed else row.pending,
        trial=None,
    )
    replaced = _replaced(row, command.command_id, f"{row.trial.adapter_id} failed on trial: {command.why}")
    return Decision(_standing(record, command.command_id, 200), record, replaced=replaced if failed else None)


def _begin(
    command: SetAlias | RollbackAlias,
    name: str,
    row: AliasRecord,
    adapter_id: str,
    limit_s: float,
    origin: Origin,
    share: float = 1.0,
) -> Decision:
    flip = PendingFlip(
        adapter_id=adapter_id,
        command=name,
        command_id=command.command_id,
        by=command.by,
        deadline_unix_ms=origin.now_unix_ms + int(1000 * limit_s),
        command_partition=origin.partition,
        command_offset=origin.offset,
        share=share,
    )
    record = _now(row, command, flip, row.trial, origin)
    return Decision(_standing(record, command.command_id, 202), record, replaced=_overtaken(row, command))


def _stay(command: SetAlias | RollbackAlias, row: AliasRecord, origin: Origin) -> Decision:
    """The alias points there already; what it waits for, and what it tries, is called off."""
    if row.pending is None and row.trial is None:
        return Decision(_standing(row, command.command_id, 200))
    record = _now(row, command, None, None, origin)
    return Decision(_standing(record, command.command_id, 200), record, replaced=_overtaken(row, command))


def _share(command: SetAlias, row: AliasRecord, trial: Trial, origin: Origin) -> Decision:
    """What is on trial gets another share, at once: it is warm. What the alias waits for is called off."""
    if row.pending is None and trial.share == command.share:
        return Decision(_standing(row, command.command_id, 200))
    trial = Trial(trial.adapter_id, command.share, command.command_id, command.by, trial.since_unix_ms)
    record = _now(row, command, None, trial, origin)
    return Decision(_standing(record, command.command_id, 200), record, replaced=_overtaken(row, command))


def _now(
    row: AliasRecord,
    command: SetAlias | RollbackAlias,
    pending: PendingFlip | None,
    trial: Trial | None,
    origin: Origin,
) -> AliasRecord:
    return msgspec.structs.replace(
        row,
        command_partition=origin.partition,
        command_offset=origin.offset,
        updated_unix_ms=origin.now_unix_ms,
        commands=[*row.commands, command.command_id][-REMEMBERED:],
        pending=pending,
        trial=trial,
    )


def _overtaken(row: AliasRecord, command: SetAlias | RollbackAlias) -> CommandResult | None:
    if row.pending is None:
        return None
    why = f"{command.command_id} came before {row.pending.adapter_id} was warm, and took its place"
    return _replaced(row, command.command_id, why)


def _replaced(row: AliasRecord, command_id: str, why: str) -> CommandResult | None:
    """The result of the command whose flip is called off."""
    if row.pending is None or row.pending.command_id == command_id:
        return None
    refusals = [Refusal("alias", why)]
    return CommandResult(row.pending.command_id, 409, adapter_id=row.adapter_id, alias=row.alias, refusals=refusals)


def _concluded(state: State, command: ConcludeFlip, row: AliasRecord) -> CommandResult:
    flip = command.flip
    if row.adapter_id == flip.adapter_id or (row.trial is not None and row.trial.command_id == flip.command_id):
        return _standing(row, flip.command_id, 200)
    adapter = state.adapters.get(flip.adapter_id)
    why = command.why or f"{flip.adapter_id} is {adapter.status if adapter is not None else 'not registered'}"
    refusals = [Refusal("alias", f"{row.alias} stays at {row.adapter_id}: {why}")]
    return msgspec.structs.replace(_standing(row, flip.command_id, 504), refusals=refusals)


def _standing(row: AliasRecord, command_id: str, status: int) -> CommandResult:
    """What stands behind the alias."""
    return CommandResult(
        command_id,
        status,
        adapter_id=row.adapter_id,
        alias=row.alias,
        previous_adapter_id=row.previous_adapter_id,
        pending_adapter_id=row.pending.adapter_id if row.pending is not None else "",
        trial_adapter_id=row.trial.adapter_id if row.trial is not None else "",
        trial_share=row.trial.share if row.trial is not None else 0.0,
    )
