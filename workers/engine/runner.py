"""What computes a step: the seam between the scheduler and torch or its simulation.

A runner owns the slots' bytes and stamps each with what it holds. Every row names the filling it was scheduled with; a
row whose name and stamp differ is never computed, so a fault in slot accounting cannot serve one customer another's
weights.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from workers.engine.scheduler import Outcome, Row
from workers.engine.sequence import Sequence as Waiting
from workers.engine.slots import NO_ADAPTER, Lease

PROBE_TOKENS = 48  # KV positions that a merge computes with


class Model(msgspec.Struct, frozen=True):
    """What the worker is told about the base model."""

    base_hash: str
    numeric_class: str
    context_length: int
    vocab_size: int


class Opened(NamedTuple):
    """An image that was checked: which pool of slots it is for, and what copies it over a whole slot of that pool.

    `copy` returns the bytes and raises ImageError or OSError.
    """

    pool: int
    copy: Callable[[Lease], int]


class Fold(NamedTuple):
    """What a merge came to: see schemas.engine.Merged."""

    numeric_class: str
    worst: float
    tolerance: float


class MergeRefused(Exception):
    """The merged model says something else than the adapter in a slot."""


class Runner(Protocol):
    model: Model

    def open(self, content_id: str, path: Path) -> Opened:
        """Checks an image. Raises ImageError."""

    def clear(self, slot: int) -> None:
        """The slot holds nothing any more."""

    def merge(
        self, merged: Lease, filling: Lease, path: Path, blocks: Sequence[int], alive: Callable[[], None]
    ) -> "Fold":
        """Folds an adapter into the weights, which stand for `merged` from here on.

        `filling` is the slot that holds the same adapter, to compare with. `blocks` are nobody's, for PROBE_TOKENS or
        what there is. `alive` is called often. Raises ImageError and MergeRefused, the weights being the base's to the
        bit; anything else must end the engine.
        """

    def unmerge(self, alive: Callable[[], None]) -> None:
        """The weights are the base's to the bit. Whatever it raises must end the engine."""

    def ready(self, sequence: Waiting) -> bool:
        """Whether rows of this sequence can be computed. What is lacking is on its way from the first call on."""

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        """Computes one step. After an exception it is asked for the same rows one by one."""


class Stamps:
    """Slot -> the filling whose bytes are really there. Slot 0 is the weights: the base's, or a merged content's."""

    def __init__(self) -> None:
        self._of: dict[int, Lease] = {NO_ADAPTER.slot: NO_ADAPTER}

    def write(self, filling: Lease) -> None:
        self._of[filling.slot] = filling

    def erase(self, slot: int) -> None:
        self._of.pop(slot, None)

    def holds(self, filling: Lease) -> bool:
        return self._of.get(filling.slot) == filling

    def mismatch(self, row: Row) -> str:
        """Why this row must not be computed; empty if its slot holds what it was scheduled with."""
        sequence, held = row.sequence, self._of.get(row.sequence.lease.slot)
        if sequence.lease.slot and not self.holds(NO_ADAPTER):
            return f"slot mismatch: for {sequence.content_id}, the weights hold {self._of.get(NO_ADAPTER.slot)}"
        if held == sequence.lease and sequence.lease.content_id == sequence.content_id:
            return ""
        return f"slot mismatch: for {sequence.content_id or 'base'} leased {sequence.lease}, the slot holds {held}"
