"""What fits into a device beside the base: KV cache, workspace, and as many adapters as are left room for. Pure."""

from collections.abc import Mapping

import msgspec


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
