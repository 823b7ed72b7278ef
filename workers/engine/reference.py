"""The operations in torch: what kernels.cpp is tested against, and what runs where there is no C++ compiler.

Slow (rows and adapters are gathered or looped over) and of another bits class than the native one. Matrix products have
one fixed width of TILE columns, W [d, k] times x^T [k, TILE], so that a row's bits do not depend on its company.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.operations import Batch, Draws, Heads, KvCache, Rope, Weight
from workers.engine.sampler import draw
from workers.engine.stacks import Adapted, SlotStacks

TILE = 32


class ReferenceOperations:
    numeric_class = f"float32/torch-{torch.__version__}/tile-{TILE}"
    device = torch.device("cpu")

    def weight(self, *parts: Tensor) -> Weight:
        # cat copies: products of unaligned memory (a mapped file) may take other paths than those of aligned memory
        whole = torch.cat([part.float() for part in parts])
        return Weight(whole, *whole.shape)

    def value_bytes(self, stored: torch.dtype) -> int:
        return 4

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        return weight.data[ids.long()]

    def linear(self, weight: Weight, x: Tensor) -> Tensor:
        out, tile = torch.empty(len(x), weight.d), torch.zeros(weight.k, TILE)
        for start in range(0, len(x), TILE):
            rows = x[start : start + TILE]
            tile.zero_()
            tile[:, : len(rows)] = rows.T
            out[start : start + TILE] = torch.mm(weight.data, tile).T[: len(rows)]
        return out

    def norm(self, x: Tensor, add: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        if add is not None:
            x += add
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain

    def project(
        self, weight: Weight, x: Tensor, stacks: SlotStacks, adapted: Sequence[Sequence[Adapted]], batch: Batch
    ) -> Tensor:
        y = self.linear(weight, x)
        for pool, matrices in zip(stacks.pools, adapted, strict=True):
            for row, slot in enumerate(batch.slots.tolist()):
                if not pool.holds(slot):
                    continue
                for of in (of for of in matrices if pool.used(slot, of)):
                    low = pool.a(slot, of).float() @ x[row]
                    y[row, of.y : of.y + of.d] += pool.scale(slot, of) * (pool.b(slot, of).float() @ low)
        return y

    def rope_store(self, qkv: Tensor, heads: Heads, rope: Rope, batch: Batch, cache: KvCache) -> None:
        at = batch.positions.long()
        rows = qkv.view(len(qkv), -1, heads.head_dim)
        turned = rows[:, : heads.heads + heads.kv_heads]
        cosine, sine = rope.cosine[at].unsqueeze(1), rope.sine[at].unsqueeze(1)
        left, right = turned.chunk(2, -1)
        turned.copy_(torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1))
        blocks = batch.tables[batch.tables_of.long(), at // BLOCK_TOKENS].long()
        cache.keys[blocks, :, :, at % BLOCK_TOKENS] = rows[:, heads.heads : heads.heads + heads.kv_heads]
        cache.values[blocks, :, at % BLOCK_TOKENS] = rows[:, heads.heads + heads.kv_heads :]

    def attend(self, qkv: Tensor, heads: Heads, batch: Batch, cache: KvCache) -> Tensor:
        group, width = heads.heads // heads.kv_heads, heads.head_dim
        out = torch.empty(len(qkv), heads.kv_heads, group, width)
        for row in range(len(qkv)):
            length = int(batch.positions[row]) + 1
            blocks = batch.tables[batch.tables_of[row], : -(-length // BLOCK_TOKENS)].long()
            keys = cache.keys[blocks].permute(1, 2, 0, 3).reshape(heads.kv_heads, width, -1)[:, :, :length]
            values = cache.values[blocks].permute(1, 0, 2, 3).reshape(heads.kv_heads, -1, width)[:, :length]
            q = qkv[row, : heads.heads * width].view(heads.kv_heads, group, width)
            out[row] = torch.softmax(q @ keys * width**-0.5, -1) @ values
        return out.view(len(qkv), -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        rows = zip(logits.numpy(), *(tensor.tolist() for tensor in draws), strict=True)
        return torch.tensor([draw(*row) for row in rows], dtype=torch.int32)
