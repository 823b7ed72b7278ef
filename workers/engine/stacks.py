"""The persistent slot stack: every adapter in a slot, as one tensor [slots, floats] that is never rebuilt.

A row of it is the payload of a slot image (workers/slot_image.py), so that A [S, r, k], B [S, r, d] (rank-major) and
scale [S] of each (layer, matrix) are strided views, and filling a slot is one copy. Slot 0 has none and costs none.
"""

from dataclasses import dataclass

from torch import Tensor

from streams.adapters.shape import MATRICES, ModelShape
from workers.engine import pages
from workers.slot_image import Layout, SlotImage, layout

_ALIGN_FLOATS = 16


@dataclass(frozen=True)
class Adapted:
    """One matrix of one layer: offsets in a slot's floats, sizes, and `y`, where its outputs start in a row of y."""

    a: int
    b: int
    scale: int
    k: int
    d: int
    y: int


class SlotStack:
    def __init__(self, shape: ModelShape, slots: int, max_rank: int) -> None:
        self.rank = max_rank
        self._layout: Layout = layout(shape, max_rank)
        self.floats = -(-self._layout.floats // _ALIGN_FLOATS) * _ALIGN_FLOATS
        self.data: Tensor = pages.zeros(slots, self.floats)

    def adapted(self, layer: int, matrices: tuple[str, ...]) -> list[Adapted]:
        """The matrices whose outputs stand side by side in one row, in that order."""
        found, y = [], 0
        for name in matrices:
            span, rank = self._layout.spans[name], self.rank
            found.append(
                Adapted(
                    a=span.a + layer * rank * span.k,
                    b=span.b + layer * rank * span.d,
                    scale=self._layout.scale + MATRICES.index(name) * self._layout.layers + layer,
                    k=span.k,
                    d=span.d,
                    y=y,
                )
            )
            y += span.d
        return found

    def fill(self, slot: int, image: SlotImage) -> int:
        """Overwrites the whole of slot 1.. with the image; the bytes copied."""
        row = self.data[slot - 1]
        row.numpy()[: self._layout.floats] = image.payload
        return self._layout.floats * row.element_size()

    def clear(self, slot: int) -> None:
        self.data[slot - 1].zero_()

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
