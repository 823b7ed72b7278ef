"""The arithmetic of a forward pass as an interface: native.py (C++) does it, reference.py (torch) is its oracle.

All tensors are float32 on the operations' device and contiguous, unless said; weights lie as the operations keep them.
Every operation is row by row: a row's result depends on that row's inputs alone. triton_operations.py does the same on
a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.engine import pages
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.stacks import Adapted, SlotStacks


@dataclass(frozen=True)
class Weight:
    """A matrix W [d, k] in whatever layout the operations chose for `data`, whose type is what W is kept in.

    `numeric_class`: what the bits of products with it depend on besides that of the operations.
    """

    data: Tensor
    d: int
    k: int
    numeric_class: str = ""


@dataclass(frozen=True)
class KvCache:
    """One layer's keys [blocks, kv_heads, head_dim, 16], and values [blocks, kv_heads, 16, head_dim]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, blocks: int, kv_heads: int, head_dim: int, device: torch.device) -> "KvCache":
        return cls(
            pages.zeros(blocks, kv_heads, head_dim, BLOCK_TOKENS, device=device),
            pages.zeros(blocks, kv_heads, BLOCK_TOKENS, head_dim, device=device),
        )


@dataclass(frozen=True)
class Rope:
    """cos and sin [context, head_dim / 2]."""

    cosine: Tensor
    sine: Tensor

    def on(self, device: torch.device) -> "Rope":
        return Rope(self.cosine.to(device), self.sine.to(device))


@dataclass(frozen=True)
class Batch:
    """n rows, one per token, int32: its id, its position, its slot (0: none), and which of `tables` is its sequence's.

    `tables` [sequences, blocks] are block numbers in the order of positions. `last` [m] are the rows to sample from,
    `by_slot` [n] all rows with those of one slot together. Rows of one sequence stand together, in order.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    by_slot: Tensor
    tables_of: Tensor
    tables: Tensor
    last: Tensor
    adapted: bool  # whether any slot is not 0

    def on(self, device: torch.device) -> "Batch":
        """On another device, without waiting for it: from pinned memory, in the stream's order."""
        if device.type == "cpu":
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return Batch(
            ids=moved(self.ids),
            positions=moved(self.positions),
            slots=moved(self.slots),
            by_slot=moved(self.by_slot),
            tables_of=moved(self.tables_of),
            tables=moved(self.tables),
            last=moved(self.last),
            adapted=self.adapted,
        )


@dataclass(frozen=True)
class Heads:
    """A qkv row is q [heads, head_dim], k [kv_heads, head_dim], v [kv_heads, head_dim]."""

    heads: int
    kv_heads: int
    head_dim: int


class Draws(NamedTuple):
    """How each of m rows is drawn: int64 seeds (the bits of an unsigned one) and positions, int32 top_ks, float32.

    On the CPU whatever the device.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_ps: Tensor
    top_ks: Tensor
    min_ps: Tensor


class Operations(Protocol):
    numeric_class: str
    device: torch.device  # where weights, stacks, caches and rows live

    def weight(self, *parts: Tensor) -> Weight:
        """Takes over W [d, k], given as one or more blocks of its rows."""

    def value_bytes(self, stored: torch.dtype) -> int:
        """What each value of a weight takes that the checkpoint has in this type."""

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        """Rows ids [n] of W, as [n, k]."""

    def linear(self, weight: Weight, x: Tensor) -> Tensor:
        """x [n, k] W^T, as [n, d]."""

    def norm(self, x: Tensor, add: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        """Adds `add` to x [n, hidden] in place, then returns RMSNorm(x) * gain."""

    def project(
        self, weight: Weight, x: Tensor, stacks: SlotStacks, adapted: Sequence[Sequence[Adapted]], batch: Batch
    ) -> Tensor:
        """linear(weight, x), plus scale * B (A x[row]) with the weights of the row's slot; slot 0 adds nothing.

        `adapted`: the matrices of this projection in each of the stacks' pools.
        """

    def rope_store(self, qkv: Tensor, heads: Heads, rope: Rope, batch: Batch, cache: KvCache) -> None:
        """Rotates q in place; stores rotated k, and v, at the rows' positions."""

    def attend(self, qkv: Tensor, heads: Heads, batch: Batch, cache: KvCache) -> Tensor:
        """[n, heads * head_dim]: each row over its sequence's positions up to and including its own."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of rows gate | up, as [n, inner]."""

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """int32 ids [m] from logits [m, vocab], as sampler.py says; -1 where a logit is not finite."""
