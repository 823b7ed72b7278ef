"""Which event a decided command is: who changed what, when, and why not where it was refused. Pure.

Events are a topic of their own, `adapter-events`, and not a part of the rows, for three reasons: a refused registration
has no row, and must not get one; rows are in every gateway's memory, history is read once in a long while; and events
stay as long as retention says, however often an alias moves. They are keyed by customer, as commands are, so that a
customer's events are in one partition in the order of its commands.

An event is written after its row and before the command's result: who has the result finds the event. A crash between
row and event: the command is delivered again and answered out of the state, which still holds the row that this command
decided, and that makes the same event again. So each is written at least once, and its identity tells the doubles.
"""

from schemas.adapters import (
    AdapterCommand,
    AdapterEvent,
    AdapterRecord,
    AliasCommand,
    AliasRecord,
    ConcludeFlip,
    EndTrial,
    QuarantineAdapter,
    Refusal,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.reasons import EventKind
from streams.control.registry import Decision, Origin, State

NAMES: dict[type[AdapterCommand], str] = {
    RegisterAdapter: "register",
    RetireAdapter: "retire",
    QuarantineAdapter: "quarantine",
    ReleaseAdapter: "release",
    SetAlias: "alias",
    RollbackAlias: "rollback",
    ConcludeFlip: "conclude",
    EndTrial: "end-trial",
}
KINDS: dict[type[AdapterCommand], EventKind] = {
    RegisterAdapter: EventKind.REGISTERED,
    RetireAdapter: EventKind.RETIRED,
    QuarantineAdapter: EventKind.QUARANTINED,
    ReleaseAdapter: EventKind.RELEASED,
}
NOT_WARM = 504
REFUSALS = (404, 409, 422)  # of others nothing was decided: they may be sent again


def event_of(
    state: State, customer: str, command: AdapterCommand, decision: Decision, origin: Origin
) -> AdapterEvent | None:
    """None for what changed nothing and refused nothing. `state` is that before the decision."""
    result = decision.result
    if result.status in REFUSALS:
        return None if decision.again else _refused(customer, command, decision, origin)
    row = decision.record if decision.record is not None else _row(state, command)
    if row is None or (row.command_partition, row.command_offset) != (origin.partition, origin.offset):
        return None  # it was so already
    if isinstance(row, AliasRecord):
        return _alias(customer, command, row, decision, origin)
    return AdapterEvent(
        customer=customer,
        kind=KINDS[type(command)],
        by=command.by,
        at_unix_ms=row.updated_unix_ms,
        command=NAMES[type(command)],
        command_id=command.command_id,
        command_partition=origin.partition,
        command_offset=origin.offset,
        adapter_id=row.adapter_id,
        content_id=row.content_id,
        status=result.status,
        why=row.why if isinstance(command, QuarantineAdapter) else "",
    )


def _alias(
    customer: str, command: AdapterCommand, row: AliasRecord, decision: Decision, origin: Origin
) -> AdapterEvent:
    """A conclusion is told as the flip that it concludes: by whom that was asked for, under whose id."""
    told = command.flip if isinstance(command, ConcludeFlip) else command
    name = command.flip.command if isinstance(command, ConcludeFlip) else NAMES[type(command)]
    waits = row.pending
    kind, to, came = EventKind.MOVED, row.adapter_id, row.previous_adapter_id
    share, reasons = 1.0, decision.result.refusals
    if isinstance(command, EndTrial):
        kind, to, came = EventKind.KEPT, row.adapter_id, command.trial.adapter_id
        reasons = [Refusal("share", f"{command.trial.adapter_id} is no longer tried: {command.why}")]
    elif waits is not None:
        kind, to, came, share = EventKind.WARMING, waits.adapter_id, row.adapter_id, waits.share
    elif row.trial is not None and row.trial.command_id == told.command_id:
        kind, to, came, share = EventKind.TRIED, row.trial.adapter_id, row.adapter_id, row.trial.share
    elif decision.result.status == NOT_WARM or not moved(command, row):
        kind = EventKind.KEPT
    return AdapterEvent(
        customer=customer,
        kind=kind,
        by=told.by,
        at_unix_ms=row.updated_unix_ms,
        command=name,
        command_id=told.command_id,
        command_partition=origin.partition,
        command_offset=origin.offset,
        adapter_id=to,
        alias=row.alias,
        previous_adapter_id=came,
        status=decision.result.status,
        reasons=reasons,
        share=share,
    )


def moved(command: AdapterCommand, row: AliasRecord) -> bool:
    """Whether the command made the row point where it does: only a conclusion and a first command do."""
    return isinstance(command, ConcludeFlip) or (not row.previous_adapter_id and len(row.commands) == 1)


def _refused(customer: str, command: AdapterCommand, decision: Decision, origin: Origin) -> AdapterEvent:
    return AdapterEvent(
        customer=customer,
        kind=EventKind.REFUSED,
        by=command.by,
        at_unix_ms=origin.now_unix_ms,
        command=NAMES[type(command)],
        command_id=command.command_id,
        command_partition=origin.partition,
        command_offset=origin.offset,
        adapter_id=decision.result.adapter_id,
        alias=decision.result.alias,
        status=decision.result.status,
        reasons=decision.result.refusals,
    )


def _row(state: State, command: AdapterCommand) -> AdapterRecord | AliasRecord | None:
    if isinstance(command, AliasCommand):
        return state.aliases.get(command.alias)
    return state.adapters.get(command.adapter_id)
