"""Which content is in which slot, who uses it, and who must go. Pure.

Slot 0 stands for the weights alone: the base, or while one content is merged into them, that content and no other;
loads never get it. 1..count are usable, numbered through over all pools, which
are the slots of one rank each; a content has its place in one of them. A slot's epoch rises whenever its content
changes, so (slot, epoch, content id) names one filling for ever. A lease is named by its sequence, so that releasing
twice or leaking is visible; only slots without leases are ever chosen for eviction.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec


class Lease(msgspec.Struct, frozen=True):
    """The filling that a sequence runs with. NO_ADAPTER for the base model; slot 0 with a content: it is merged."""

    slot: int
    epoch: int
    content_id: str


NO_ADAPTER = Lease(0, 0, "")


class Placement(msgspec.Struct, frozen=True):
    """Where a content was put, and whose place it took ("" if the slot was free)."""

    slot: int
    epoch: int
    evicted: str


class SlotInUse(Exception):
    """The content is leased by running sequences, or another one is merged."""


@dataclass
class _Slot:
    index: int
    pool: int
    content_id: str = ""
    epoch: int = 0
    used: int = 0  # order of the last use, for LRU
    leases: set[int] = field(default_factory=set)


class Slots:
    """`counts`: slots of each pool."""

    def __init__(self, *counts: int) -> None:
        pools = [pool for pool, count in enumerate(counts) for _ in range(count)]
        self._slots = [_Slot(index, pool) for index, pool in enumerate(pools, 1)]
        self._weights = _Slot(index=0, pool=-1)
        self._of: dict[str, _Slot] = {}
        self._leased: dict[int, _Slot] = {}
        self._uses = 0

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def leased(self) -> int:
        """Open leases."""
        return len(self._leased)

    def leases(self) -> dict[int, str]:
        """Sequence -> the content that it has a lease on."""
        return {seq: slot.content_id for seq, slot in self._leased.items()}

    @property
    def merged(self) -> Lease:
        """What the weights stand for: NO_ADAPTER unless a content is merged."""
        weights = self._weights
        return Lease(0, weights.epoch, weights.content_id) if weights.content_id else NO_ADAPTER

    def contents(self) -> dict[str, tuple[int, int]]:
        """content id -> (slot, epoch) of everything resident."""
        return {content: (slot.index, slot.epoch) for content, slot in self._of.items()}

    def holds(self, content_id: str) -> bool:
        """Whether a sequence could run with the content: merged or, while none is, in a slot."""
        merged = self._weights.content_id
        return content_id == merged if merged else content_id in self._of

    def lease(self, seq: int, content_id: str) -> Lease:
        """`seq` runs with this content from now on. Raises KeyError if it cannot or `seq` has a lease."""
        if seq in self._leased:
            raise KeyError(f"sequence {seq} has a lease already")
        if not self.holds(content_id):
            raise KeyError(f"{content_id} is not held")
        slot = self._weights if self._weights.content_id else self._of[content_id]
        slot.leases.add(seq)
        self._leased[seq] = slot
        self._use(slot)
        return Lease(slot.index, slot.epoch, content_id)

    def release(self, seq: int) -> None:
        """The one way a lease ends; nothing if `seq` has none."""
        slot = self._leased.pop(seq, None)
        if slot is not None:
            slot.leases.remove(seq)
            self._use(slot)

    def place(self, content_id: str, spared: Callable[[str], bool], pool: int = 0) -> Placement | None:
        """A slot of `pool` for a content that is not resident: a free one, else the longest unused idle one not spared.

        None while there is none. The slot belongs to the content from here on, under a new epoch: the caller overwrites
        all of it before the next step, or calls `vacate`.
        """
        if content_id in self._of:
            raise ValueError(f"{content_id} is resident")
        mine = [s for s in self._slots if s.pool == pool and not s.leases]
        idle = [s for s in mine if not (s.content_id and spared(s.content_id))]
        if not idle:
            return None
        slot = min(idle, key=lambda s: (s.content_id != "", s.used))
        evicted = slot.content_id
        self._of.pop(evicted, None)
        slot.content_id, slot.epoch = content_id, slot.epoch + 1
        self._of[content_id] = slot
        self._use(slot)
        return Placement(slot.index, slot.epoch, evicted)

    def vacate(self, content_id: str) -> int:
        """Takes a content out of its slot, whose number is returned; 0 if it was in none. Raises SlotInUse."""
        slot = self._of.get(content_id)
        if slot is None:
            return 0
        if slot.leases:
            raise SlotInUse(f"{content_id} is in use by {len(slot.leases)} sequences")
        del self._of[content_id]
        slot.content_id, slot.epoch = "", slot.epoch + 1
        return slot.index

    def merge(self, content_id: str) -> Lease:
        """The weights stand for this content from here on, under a new epoch. Raises SlotInUse."""
        if self._leased or self._weights.content_id:
            raise SlotInUse(f"{len(self._leased)} leases are open, merged is {self._weights.content_id or 'nothing'}")
        self._weights.content_id, self._weights.epoch = content_id, self._weights.epoch + 1
        return self.merged

    def unmerge(self) -> None:
        """The weights are the base's again. Raises SlotInUse."""
        if self._leased:
            raise SlotInUse(f"{len(self._leased)} leases are open")
        self._weights.content_id = ""

    def _use(self, slot: _Slot) -> None:
        self._uses += 1
        slot.used = self._uses
