"""An adapter's change to the base, in memory: for each adapted matrix its A, B and scale. Pure.

h = x W^T + scale * (x A^T) B^T. The key is (layer, matrix), matrix one of shape.MATRICES.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.adapters.shape import MATRICES

Array = npt.NDArray[np.float32]
Place = tuple[int, str]


class Pair(NamedTuple):
    """a: float32 [r, k], b: float32 [d, r], unscaled; scale: alpha / r, or alpha / sqrt(r) for rsLoRA."""

    a: Array
    b: Array
    scale: float


Delta = Mapping[Place, Pair]

_RANK_OF = {matrix: index for index, matrix in enumerate(MATRICES)}


def ordered(places: Mapping[Place, object]) -> list[Place]:
    """The one order in which an adapter's matrices are hashed and written: by layer, then as in MATRICES."""
    return sorted(places, key=lambda place: (place[0], _RANK_OF[place[1]]))


def is_zero(pair: Pair) -> bool:
    """No rank component has both a non-zero row of A and a non-zero column of B: it changes nothing."""
    return pair.scale == 0 or not bool((pair.a.any(axis=1) & pair.b.any(axis=0)).any())
