"""Large zeroed tensors whose memory is taken page by page when it is first used.

Small pages on purpose: asked for huge ones, the system spent seconds to find them at start, and no step was faster.
"""

import math
import mmap

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")


def zeros(*size: int, device: torch.device = CPU) -> Tensor:
    """float32 zeros of this size, aligned to a page. A new engine is ready without touching its whole KV cache.

    Elsewhere than on the CPU just zeros.
    """
    floats = math.prod(size)
    if floats == 0 or device.type != "cpu":
        return torch.zeros(*size, device=device)
    memory = mmap.mmap(-1, floats * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, np.float32)).view(*size)
