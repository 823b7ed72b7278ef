"""What fits into a device beside the base: KV cache, workspace, and as many adapters as are left room for. Pure."""

from collections.abc import Collection, Mapping

import msgspec

from streams.adapters.shape import ModelShape
from workers.engine.scheduler import Limits
from workers.slot_image import layout

_FLOAT_BYTES = 4


class Budget(msgspec.Struct, frozen=True):
    """Bytes of each part. `adapter_bytes`: what is left for slots. Sums are exact: nothing is rounded on the way."""

    total_bytes: int
    base_bytes: int
    kv_bytes: int
    workspace_bytes: int

    @property
    def adapter_bytes(self) -> int:
        """Raises MemoryError if the other parts do not fit."""
        left = self.total_bytes - self.base_bytes - self.kv_bytes - self.workspace_bytes
        if left < 0:
            raise MemoryError(
                f"base {self.base_bytes}, KV cache {self.kv_bytes} and workspace {self.workspace_bytes} bytes are"
                f" {-left} more than the {self.total_bytes} there are: give fewer KV tokens"
            )
        return left

    def slots(self, slot_bytes: int, cap: int | None = None) -> int:
        """Adapters of `slot_bytes` that fit, at most `cap`."""
        fitting = self.adapter_bytes // slot_bytes
        return fitting if cap is None else min(fitting, cap)

    def spare_bytes(self, pools: Mapping[int, tuple[int, int]]) -> int:
        """What is left beside pools of slots: rank -> (slots, bytes of one). Raises MemoryError if they do not fit."""
        needed = sum(count * size for count, size in pools.values())
        if needed > self.adapter_bytes:
            told = ", ".join(f"{count} of rank {rank}" for rank, (count, _) in sorted(pools.items()))
            raise MemoryError(f"slots ({told}) need {needed} bytes, {self.adapter_bytes} are left: give fewer slots")
        return self.adapter_bytes - needed


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, value_bytes: int) -> int:
    """Keys and values of `tokens` positions."""
    return 2 * layers * kv_heads * head_dim * tokens * value_bytes


def base_bytes(shape: ModelShape, tied: bool, biased: Collection[str], value_bytes: int) -> int:
    """The base as it is served: matrices in values of `value_bytes`, norms and biases in float32.

    Kernels pad a matrix's outputs to a multiple of 32, which is not counted: real models' are multiples already.
    `tied`: the head is the embedding. `biased`: the matrices whose outputs have a bias.
    """
    sizes = shape.matrices()
    matrices = shape.layers * sum(k * d for k, d in sizes.values()) + shape.vocab * shape.hidden * (1 if tied else 2)
    vectors = shape.hidden * (2 * shape.layers + 1) + shape.layers * sum(sizes[name][1] for name in biased)
    return matrices * value_bytes + vectors * _FLOAT_BYTES


def workspace_bytes(shape: ModelShape, limits: Limits) -> int:
    """The most a step needs at a time: activations of all its rows, or logits and the copy that penalties work on."""
    rows = limits.max_rows + limits.prompt_tokens_per_step
    activations = rows * 4 * (shape.hidden + max(shape.intermediate, shape.heads * shape.head_dim))
    logits = 2 * limits.max_rows * shape.vocab
    return (max(activations, logits) + shape.context * shape.head_dim) * _FLOAT_BYTES


def slot_bytes(shape: ModelShape, rank: int) -> int:
    """One slot, which has room for float32 values."""
    return layout(shape, rank).slot_floats * _FLOAT_BYTES


def fitted(budget: Budget, shape: ModelShape, pools: Mapping[int, int]) -> dict[int, int]:
    """Rank -> slots: of a single pool as many of them as fit; several pools as they are.

    Raises MemoryError if not one slot fits, or not all of several pools.
    """
    if len(pools) > 1:
        budget.spare_bytes({rank: (count, slot_bytes(shape, rank)) for rank, count in pools.items()})
        return dict(pools)
    ((rank, cap),) = pools.items()
    fitting = budget.slots(slot_bytes(shape, rank), cap)
    if not fitting:
        budget.spare_bytes({rank: (1, slot_bytes(shape, rank))})
    return {rank: fitting}
