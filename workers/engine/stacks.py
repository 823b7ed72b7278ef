"""The persistent slot stacks: every adapter in a slot, as one tensor [slots, floats] per rank pool, never rebuilt.

A pool's slots all have one rank and hold adapters up to it. A row of a stack is the payload of a slot image
(workers/slot_image.py), so that A [S, r, k], B [S, r, d] (rank-major), scale [S] and rank [S] of each (layer, matrix)
are strided views, and filling a slot is one copy. Slots are numbered through over all pools; slot 0 has none and costs
none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streams.adapters.shape import MATRICES, ModelShape
from workers.engine import pages
from workers.slot_image import ImageError, Layout, SlotImage, layout

_ALIGN_FLOATS = 16


@dataclass(frozen=True)
class Adapted:
    """One matrix of one layer: offsets in a slot's floats, sizes, and `y`, where its outputs start in a row of y."""

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
        self.floats = -(-self._layout.floats // _ALIGN_FLOATS) * _ALIGN_FLOATS
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
        """Overwrites the whole of a slot with the image; the bytes copied."""
        row = self.data[slot - self.first]
        if row.is_cpu:
            row.numpy()[: self._layout.floats] = image.payload
        else:  # the copy in between can go once images are mapped into pinned memory
            row[: self._layout.floats].copy_(torch.tensor(image.payload))
        return self._layout.floats * row.element_size()

    def clear(self, slot: int) -> None:
        self.data[slot - self.first].zero_()

    def a(self, of: Adapted) -> Tensor:
        """A [S, r, k]."""
        return self._view(of.a, self.rank, of.k)

    def b(self, of: Adapted) -> Tensor:
        """B [S, d, r]."""
        return self._view(of.b, self.rank, of.d).transpose(1, 2)

    def scale(self, of: Adapted) -> Tensor:
        """scale [S]."""
        return self.data[:, of.scale]

    def _view(self, at: int, rows: int, columns: int) -> Tensor:
        return self.data[:, at : at + rows * columns].view(-1, rows, columns)


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
        """Overwrites the whole of a slot; the bytes copied. Raises ImageError if the image is for another rank."""
        pool = self.pool(slot)
        if image.rank != pool.rank:
            raise ImageError(f"the image is laid out for rank {image.rank}, slot {slot} for {pool.rank}")
        return pool.fill(slot, image)

    def clear(self, slot: int) -> None:
        self.pool(slot).clear(slot)
