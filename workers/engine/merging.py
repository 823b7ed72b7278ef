"""Folding one adapter into the base's weights, in place, and taking it out again to the bit.

Owns what W holds: the checkpoint's matrices, or those with one adapter folded in. There is no second copy of the base:
each way the matrices are read from the checkpoint, packed anew and copied over the old ones, one at a time. A matrix's
digest, taken before it is first overwritten, proves that it came back; a checkpoint that changed on the disk meanwhile
cannot pass for the base. A failure halfway leaves W in between: it must end the engine; another one starts unmerged.

W + scale * B A is summed in float64, rank by rank in their order, and rounded to float32 once. A product of two
float32 is exact in float64, so neither fused multiply-adds nor vectors of another width change a bit: every machine
gets the same merged weights. Where the engine keeps W in bfloat16, that sum is rounded to it once more.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from streams.adapters.shape import MATRICES, ModelShape
from workers.engine.operations import Operations, Weight
from workers.engine.weights import BaseWeights
from workers.slot_image import SlotImage

# Of the largest logit. Measured: rounding makes 3e-6 with an adapter as strong as its base and 1e-5 with ones far
# stronger, a factor that is wrong by a thousandth in one of 21 matrices 7e-4.
TOLERANCE = 1e-4
BF16_TOLERANCE = 3e-2
PROBES = [[(37 * n + i * i * 5 + 3) for i in range(length)] for n, length in enumerate((1, 2, 5, 13, 24, 40))]
_ROWS = 64  # summed at a time: they stay in the cache, and a block takes milliseconds


class BaseChanged(Exception):
    """The checkpoint is not what the engine was started with."""


class Foldable(NamedTuple):
    """Adaptable matrices of one layer, packed side by side, and their tensors in the checkpoint."""

    layer: int
    matrices: tuple[str, ...]
    tensors: tuple[str, ...]
    weight: Weight


class Weights:
    """The adaptable weights of one model. Not while a step runs; whatever a method raises must end the engine.

    `tolerance`: how far merged logits may be from unmerged ones.
    """

    def __init__(self, folder: Path, shape: ModelShape, operations: Operations, foldables: list[Foldable]) -> None:
        self._folder = folder
        self._sizes = shape.matrices()
        self._ops = operations
        self._foldables = foldables
        kept = {foldable.weight.data.dtype for foldable in foldables}
        self.tolerance = BF16_TOLERANCE if torch.bfloat16 in kept else TOLERANCE
        self._base: dict[int, bytes] = {}  # what was overwritten, by its place in `_foldables` -> its digest before

    def fold(self, image: SlotImage, alive: Callable[[], None]) -> str:
        """W + scale * B A for every matrix that the adapter has; a digest of the result. `alive` is called often.

        W is the base. Raises BaseChanged, UnsupportedModel, or what reading raises.
        """
        checkpoint = BaseWeights(self._folder)
        result = hashlib.sha256()
        for at, foldable in enumerate(self._foldables):
            if any(_rank(image, foldable.layer, matrix) for matrix in foldable.matrices):
                parts = self._read(checkpoint, foldable)
                if not torch.equal(self._packed(parts, foldable), foldable.weight.data):
                    raise BaseChanged(_said(foldable))
                self._base[at] = _digest(foldable.weight)
                for n, matrix in enumerate(foldable.matrices):
                    parts[n] = _with(image, foldable.layer, matrix, parts[n], alive)
                foldable.weight.data.copy_(self._packed(parts, foldable))
                result.update(_digest(foldable.weight))
                alive()
        return result.hexdigest()

    def restore(self, alive: Callable[[], None]) -> None:
        """W as before `fold`. Raises BaseChanged, UnsupportedModel, or what reading raises."""
        checkpoint = BaseWeights(self._folder)
        for at, digest in self._base.items():
            foldable = self._foldables[at]
            foldable.weight.data.copy_(self._packed(self._read(checkpoint, foldable), foldable))
            if _digest(foldable.weight) != digest:
                raise BaseChanged(_said(foldable))
            alive()
        self._base.clear()

    def _read(self, checkpoint: BaseWeights, foldable: Foldable) -> list[Tensor]:
        sizes = [self._sizes[matrix] for matrix in foldable.matrices]
        return [checkpoint.take(name, d, k) for name, (k, d) in zip(foldable.tensors, sizes, strict=True)]

    def _packed(self, parts: list[Tensor], like: Foldable) -> Tensor:
        return self._ops.weight(*(part.to(like.weight.data) for part in parts)).data


def folded(weight: Tensor, a: Tensor, b: Tensor, scale: float, alive: Callable[[], None]) -> Tensor:
    """float32(weight + scale * b a) of weight [d, k], a [r, k], b [d, r], in the fixed order that the module says."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    a, b = a.double(), b.double()
    for first in range(0, len(weight), _ROWS):
        block = slice(first, first + _ROWS)
        total = torch.zeros(out[block].shape, dtype=torch.float64)
        for at in range(len(a)):
            total.addr_(b[block, at], a[at])
        out[block] = total.mul_(scale).add_(weight[block])
        alive()
    return out


def difference(unmerged: Tensor, merged: Tensor) -> float:
    """The largest of |merged - unmerged|, in parts of the largest |unmerged|; not a number if a logit is none."""
    return float((merged - unmerged).abs().max() / unmerged.abs().max())


def _with(image: SlotImage, layer: int, matrix: str, weight: Tensor, alive: Callable[[], None]) -> Tensor:
    """The matrix with the image's part of it, if it has one."""
    rank = _rank(image, layer, matrix)
    if not rank:
        return weight
    a, b = torch.tensor(image.a(layer, matrix)[:rank]), torch.tensor(image.b(layer, matrix)[:, :rank])
    return folded(weight, a, b, float(image.scale()[MATRICES.index(matrix), layer]), alive)


def _rank(image: SlotImage, layer: int, matrix: str) -> int:
    return int(image.ranks()[MATRICES.index(matrix), layer])


def _said(foldable: Foldable) -> str:
    return f"{', '.join(foldable.tensors)}: the checkpoint has others than this engine was started with"


def _digest(weight: Weight) -> bytes:
    return hashlib.sha256(weight.data.view(torch.uint8).cpu().numpy().data).digest()
