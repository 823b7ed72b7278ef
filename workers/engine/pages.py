"""Large zeroed tensors whose memory is taken page by page when it is first used.

Small pages on purpose: asked for huge ones, the system spent seconds to find them at start, and no step was faster.
"""

import math
import mmap

import numpy as np
import torch
from torch import Tensor


def zeros(*size: int) -> Tensor:
    """float32 zeros of this size, aligned to a page. A new engine is ready without touching its whole KV cache."""
    floats = math.prod(size)
    if floats == 0:
        return torch.zeros(*size)
    memory = mmap.mmap(-1, floats * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, np.float32)).view(*size)
