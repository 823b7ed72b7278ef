"""How the next token is drawn: a function of the logits, the settings and (seed, output position), and nothing else.

temperature 0: the likeliest id, the lowest among equals. Else the inverse of the distribution function at one uniform
number: over all ids in order, or, where top_k, top_p or min_p leave some out, over those that are left, from the
likeliest down (schemas/requests.py says which). This is the definition; kernels.cpp does the same, fast. A logit that
is not finite gives -1.
"""

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def noise(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to a seed (64 bits of it) and an output position."""
    mixed = _mix((_mix((seed + _STEP) & _MASK) + (position + 1) * _STEP) & _MASK)
    return float((mixed >> 11) * 2.0**-53)


def noises(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`noise` of many at once; seeds are the bits of unsigned ones."""

    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    step = np.uint64(_STEP)
    mixed = mix(mix(seeds.view(np.uint64) + step) + (positions.view(np.uint64) + np.uint64(1)) * step)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw(
    logits: npt.NDArray[np.float32],
    seed: int,
    position: int,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    min_p: float = 0.0,
) -> int:
    """The id drawn from logits [vocab]; -1 if one of them is not finite."""
    if not np.isfinite(logits).all():
        return -1
    narrow, top_p, min_p = np.float32(temperature), float(np.float32(top_p)), float(np.float32(min_p))
    if narrow == 0:  # what a float32 cannot tell from 0 is greedy too
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        mass = np.exp(np.maximum((logits - logits.max()) / narrow, -87.0)).astype(np.float64)
    u = noise(seed, position)
    if top_p >= 1 and top_k == 0 and min_p <= 0:
        return _inverse(mass, u)
    order = np.lexsort((np.arange(len(mass)), -mass))
    total = mass.sum()
    if 0 < top_k < len(order):
        order = order[:top_k]
        total = np.cumsum(mass[order])[-1]
    if top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(mass[order]), top_p * total)) + 1]
    likely = order[mass[order] >= min_p * mass[order[0]]]
    return int(likely[_inverse(mass[likely], u)])


def _inverse(mass: npt.NDArray[np.float64], u: float) -> int:
    total = np.cumsum(mass)
    return min(int(np.searchsorted(total, u * total[-1], side="right")), len(mass) - 1)
