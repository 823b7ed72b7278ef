"""What a pending flip needs next: adapters loaded, patience, or to be concluded. Pure.

Warm means: in a slot of every owner, by rendezvous hash over the replicas that take work at this moment. So an owner
that dies meanwhile is replaced by the next one, and one that joins is waited for.
No replica takes work: the flip goes ahead. Nothing could be warmed, nobody is served by the old version either, and a
deploy must not hang on a fleet that is scaled to nothing. But a registry that has just started does not know yet who
lives: it waits until each replica of the table was heard, or was silent for long enough to be dead.
An owner that can never load it (a corrupt file, a rank too high) ends the flip at once, a rollback too: it would point
at what answers nobody.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from schemas.adapters import AdapterRecord, PendingFlip
from schemas.reasons import AdapterStatus
from schemas.replicas import Answer
from streams.placement.rendezvous import OWNERS
from streams.placement.warm import cold_owners


class Conclude(msgspec.Struct, frozen=True):
    """`why` is empty for a flip to a warm adapter."""

    warm: bool
    why: str = ""


class Load(msgspec.Struct, frozen=True):
    """These replicas must load the adapter."""

    places: list[int]


def step(
    flip: PendingFlip,
    adapter: AdapterRecord | None,
    slots: Mapping[int, Collection[str]] | None,
    now_unix_ms: int,
    owners: int = OWNERS,
    failures: Mapping[int, Answer] = MappingProxyType({}),
) -> Conclude | Load:
    """`slots`: the replicas that take work and what is in their slots; None while it is not known who lives.

    `failures`: of the replicas that were asked to load it and could not.
    """
    if adapter is None or adapter.status is not AdapterStatus.READY:
        return Conclude(False, f"{flip.adapter_id} is {adapter.status if adapter is not None else 'not registered'}")
    cold = cold_owners(flip.adapter_id, slots, owners) if slots is not None else []
    if slots is not None and not cold:
        return Conclude(True, "" if slots else "no replica takes work: there was nothing to warm")
    failed = {place: failures[place] for place in cold if place in failures}
    for place, answer in failed.items():
        if answer.lasting:
            return Conclude(False, f"replica {place} cannot load {flip.adapter_id}: {answer.reason}")
    if now_unix_ms < flip.deadline_unix_ms:
        return Load(cold)
    where = f"replicas {cold} have not loaded" if cold else "no replica was heard that could load"
    why = f"{where} {flip.adapter_id} in time" + "".join(f"; {p}: {answer.reason}" for p, answer in failed.items())
    return Conclude(flip.command == "rollback", why)


def old_versions(
    previous: str, slots: Mapping[int, Collection[str]], content: Mapping[str, str], in_use: Collection[str]
) -> list[int]:
    """The replicas where the version that an alias has left can be taken out of its slot.

    `content`: adapter -> content id; `in_use`: adapters that an alias points at, or will. Slots are by content: one
    whose bytes another alias' adapter has, too, stays.
    """
    if content.get(previous) in {content.get(adapter) for adapter in in_use}:
        return []
    return [place for place, held in slots.items() if previous in held]
