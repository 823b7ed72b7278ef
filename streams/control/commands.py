"""A record of `adapter-commands` to a command, or to everything that is wrong with it. Pure.

The decoder of schemas.codec stops at the first fault; a pipeline is told all of them at once.
"""

from typing import Any

import msgspec

from schemas.adapters import (
    AdapterCommand,
    ConcludeFlip,
    EndTrial,
    QuarantineAdapter,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from streams.adapters.refusals import Refusals, clip

_KINDS: dict[str, type[AdapterCommand]] = {
    "register": RegisterAdapter,
    "retire": RetireAdapter,
    "quarantine": QuarantineAdapter,
    "release": ReleaseAdapter,
    "alias": SetAlias,
    "rollback": RollbackAlias,
    "conclude": ConcludeFlip,
    "end-trial": EndTrial,
}
_LONGEST_ID = 200


class BadCommand(Exception):
    """`command_id` is empty when there is nobody to answer."""

    def __init__(self, command_id: str, refusals: Refusals) -> None:
        super().__init__("; ".join(f"{reason.field}: {reason.message}" for reason in refusals.found))
        self.command_id = command_id
        self.refusals = refusals


def read_command(raw: bytes) -> AdapterCommand:
    """Raises BadCommand with every reason."""
    refusals = Refusals()
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        refusals.add("command", f"no JSON: {error}")
        raise BadCommand("", refusals) from None
    if not isinstance(told, dict):
        refusals.add("command", "a JSON object is needed")
        raise BadCommand("", refusals)
    command_id = told.get("command_id")
    if not isinstance(command_id, str) or not 0 < len(command_id) <= _LONGEST_ID:
        refusals.add("command_id", f"a text of 1 to {_LONGEST_ID} characters is needed")
        raise BadCommand("", refusals)
    name = told.pop("type", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        refusals.add("type", f"{clip(repr(name))}: one of {', '.join(_KINDS)} is needed")
        raise BadCommand(command_id, refusals)
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name not in told:
            if field.required:
                refusals.add(field.name, "missing")
            continue
        try:
            fields[field.name] = msgspec.convert(told.pop(field.name), field.type)
        except msgspec.ValidationError as error:
            refusals.add(field.name, str(error))
    for unknown in told:
        refusals.add(unknown, f"unknown field; {name} takes {', '.join(kind.__struct_fields__)}")
    if refusals:
        raise BadCommand(command_id, refusals)
    return kind(**fields)
