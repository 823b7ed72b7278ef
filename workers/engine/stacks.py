"""The persistent slot stacks: every adapter in a slot, as one tensor [slots, floats] per rank pool, never rebuilt.

A pool's slots all have one rank and hold adapters up to it. A row of a stack has room for a payload of a slot image
(workers/slot_image.py) in float32 and begins with whatever payload it holds, its precision first: filling a slot is one
copy, and slots that lie side by side may hold values of different precisions. What is read of a slot is found from its
own precision alone. Slots are numbered through over all pools; slot 0 has none and costs none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streams.adapters.shape import MATRICES, ModelShape
from workers.engine import pages
from workers.slot_image import ImageError, Layout, Precision, SlotImage, layout

_DTYPES = {Precision.F32: torch.float32, Precision.BF16: torch.bfloat16, Precision.F16: torch.float16}


@dataclass(frozen=True)
class Adapted:
    """One matrix of one layer: where A and B lie in a slot's values, scale and rank in its floats, and its sizes.

    `y`: where its outputs start in a row of y.
    """

    a: int
    b: int
    scale: int
    rank: int
    k: int
    d: int
    y: int


class SlotPool:
    """Slots first .. first + slots - 1, for ranks up to `rank`."""

    def __init__(self, shape: ModelShape, rank: int, first: int, slots: int, device: torch.device) -> None:
        self.rank, self.first, self.slots = rank, first, slots
        self._layout: Layout = layout(shape, rank)
        self.floats = self._layout.slot_floats
        self.values = self._layout.values  # where a slot's values begin, in floats
        self.data: Tensor = pages.zeros(slots, self.floats, device=device)

    def holds(self, slot: int) -> bool:
        return self.first <= slot < self.first + self.slots

    def adapted(self, layer: int, matrices: tuple[str, ...]) -> list[Adapted]:
        """The matrices whose outputs stand side by side in one row, in that order."""
        found, y, plan = [], 0, self._layout
        for name in matrices:
            span, at = plan.spans[name], MATRICES.index(name) * plan.layers + layer
            a, b = span.a + layer * self.rank * span.k, span.b + layer * self.rank * span.d
            found.append(Adapted(a, b, plan.scale + at, plan.ranks + at, span.k, span.d, y))
            y += span.d
        return found

    def fill(self, slot: int, image: SlotImage) -> int:
        """Overwrites the whole of a slot with the image; the bytes copied. Raises ImageError."""
        size = image.payload_bytes
        row = self.data[slot - self.first].view(torch.uint8)[:size]
        if row.is_cpu:
            image.copy_to(row.numpy())
        else:  # the copy in between can go once images are read into pinned memory
            between = torch.empty(size, dtype=torch.uint8)
            image.copy_to(between.numpy())
            row.copy_(between)
        return size

    def clear(self, slot: int) -> None:
        self.data[slot - self.first].zero_()

    def a(self, slot: int, of: Adapted) -> Tensor:
        """A [r, k] of one slot, in its precision."""
        return self._view(slot, of.a, of.k)

    def b(self, slot: int, of: Adapted) -> Tensor:
        """B [d, r] of one slot, in its precision."""
        return self._view(slot, of.b, of.d).T

    def scale(self, slot: int, of: Adapted) -> Tensor:
        return self.data[slot - self.first, of.scale]

    def used(self, slot: int, of: Adapted) -> bool:
        """Whether the slot has something for this matrix; without it, it may not even have a precision."""
        return bool(self.data[slot - self.first, of.rank] > 0)

    def _view(self, slot: int, at: int, columns: int) -> Tensor:
        row = self.data[slot - self.first]
        values = row[self.values :].view(_DTYPES[Precision(int(row[0]))])
        return values[at : at + self.rank * columns].view(self.rank, columns)


class SlotStacks:
    """`slots`: how many of each rank. Numbers go up with the rank."""

    def __init__(self, shape: ModelShape, slots: Mapping[int, int], device: torch.device = pages.CPU) -> None:
        self.pools: list[SlotPool] = []
        first = 1
        for rank, count in sorted(slots.items()):
            self.pools.append(SlotPool(shape, rank, first, count, device))
            first += count

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(pool.rank for pool in self.pools)

    def pool(self, slot: int) -> SlotPool:
        """The one that has this slot, not 0."""
        return next(pool for pool in self.pools if pool.holds(slot))

    def adapted(self, layer: int, matrices: tuple[str, ...]) -> list[list[Adapted]]:
        """Per pool."""
        return [pool.adapted(layer, matrices) for pool in self.pools]

    def fill(self, slot: int, image: SlotImage) -> int:
        """Overwrites the whole of a slot; the bytes copied. Raises ImageError if it is cut or for another rank."""
        pool = self.pool(slot)
        if image.rank != pool.rank:
            raise ImageError(f"the image is laid out for rank {image.rank}, slot {slot} for {pool.rank}")
        return pool.fill(slot, image)

    def clear(self, slot: int) -> None:
        self.pool(slot).clear(slot)
