"""The operations on a GPU: Triton's kernels (triton_kernels.py), base products by torch in float32.

Base products have one fixed width of TILE rows, so that the library picks one kernel and a row's bits do not depend on
its company. Drawing goes through torch's own operations for now. Nothing here waits for the device: what a step needs
from the host is copied from pinned memory in the stream's order (Batch.on), and only who reads the sampled ids waits.

Under TRITON_INTERPRET=1 all of this runs on the CPU, for tests.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor

from workers.engine import triton_kernels
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.operations import Batch, Draws, Heads, KvCache, Rope, Weight
from workers.engine.sampler import noises
from workers.engine.stacks import Adapted, SlotPool, SlotStacks

TILE = 64  # rows of a base product
RUN = 16  # rows of one slot that share an adapter's loads
SHRINK_COLUMNS, SHRINK_SPLIT, EXPAND_COLUMNS = 64, 512, 64
QUERY_LANES, KEYS, ATTEND_SPLIT = 32, 32, 512
SILU_COLUMNS = 1024
_NARROWEST = 16  # of a matrix in a product
_UNIT = 2.0**44  # of the whole numbers that probabilities are summed as: 2^18 ids of the largest still fit 63 bits


@dataclass(frozen=True)
class _Pool:
    """What the kernels are told of one projection's matrices in one pool."""

    pool: SlotPool
    memory: tuple[Tensor, Tensor, Tensor]  # the slots as float32, bfloat16 and float16
    table: Tensor
    widest: int
    lanes: int  # the rank, as wide as a product wants it


class TritonOperations:
    """On `device`: a GPU, or the CPU under the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.set_float32_matmul_precision("highest")  # no tf32
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # said aloud: Triton's own default is about to change
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        self.numeric_class = (
            f"float32/torch-{torch.__version__}/triton-{triton.__version__}/{name.replace(' ', '-').replace('/', '-')}"
            f"/tile-{TILE}/lora-{RUN}-{SHRINK_COLUMNS}-{SHRINK_SPLIT}-{EXPAND_COLUMNS}"
            f"/attend-{QUERY_LANES}-{KEYS}-{ATTEND_SPLIT}"
        )
        self._pools: WeakKeyDictionary[SlotStacks, dict[int, tuple[object, list[_Pool]]]] = WeakKeyDictionary()

    def weight(self, *parts: Tensor) -> Weight:
        whole = torch.cat([part.to(self.device).float() for part in parts])
        return Weight(whole, *whole.shape)

    def value_bytes(self, stored: torch.dtype) -> int:
        return 4

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        return weight.data[ids.long()]

    def linear(self, weight: Weight, x: Tensor) -> Tensor:
        n, whole = len(x), -(-len(x) // TILE) * TILE
        padded = x if n == whole else torch.nn.functional.pad(x, (0, 0, 0, whole - n))
        out = torch.empty(whole, weight.d, device=self.device)
        for start in range(0, whole, TILE):
            torch.mm(padded[start : start + TILE], weight.data.T, out=out[start : start + TILE])
        return out[:n]

    def norm(self, x: Tensor, add: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        n, width = x.shape
        out = torch.empty_like(x)
        if n:
            lanes, adds = triton.next_power_of_2(width), add is not None
            triton_kernels.norm[(n,)](x, add if adds else x, gain, out, width, eps, ADD=adds, WIDTH=lanes, num_warps=8)
        return out

    def project(
        self, weight: Weight, x: Tensor, stacks: SlotStacks, adapted: Sequence[Sequence[Adapted]], batch: Batch
    ) -> Tensor:
        y = self.linear(weight, x)
        known = self._pools.setdefault(stacks, {})
        if id(adapted) not in known:
            known[id(adapted)] = (adapted, _pools(stacks, adapted))  # holding it keeps its id its own
        n, k = x.shape
        splits = triton.cdiv(k, SHRINK_SPLIT)
        for at in known[id(adapted)][1]:
            matrices, pool = len(at.table), at.pool
            low = torch.empty(splits, n, matrices, at.lanes, device=self.device)
            told = (*at.memory, at.table, batch.slots, batch.by_slot, n)
            held = (pool.first, pool.slots, pool.floats, pool.values, at.lanes, RUN)
            triton_kernels.shrink[n, splits, matrices](x, low, *told, k, *held, SHRINK_COLUMNS, SHRINK_SPLIT)
            triton_kernels.expand[n, triton.cdiv(at.widest, EXPAND_COLUMNS), matrices](
                low, y, *told, weight.d, splits, *held, EXPAND_COLUMNS
            )
        return y

    def rope_store(self, qkv: Tensor, heads: Heads, rope: Rope, batch: Batch, cache: KvCache) -> None:
        triton_kernels.rope_store[(len(qkv),)](
            qkv,
            rope.cosine,
            rope.sine,
            batch.positions,
            batch.tables_of,
            batch.tables,
            cache.keys,
            cache.values,
            batch.tables.shape[1],
            *(heads.heads, heads.kv_heads, heads.head_dim),
            PARTS=triton.next_power_of_2(heads.heads + 2 * heads.kv_heads),
            HALF=triton.next_power_of_2(heads.head_dim // 2),
            BLOCK=BLOCK_TOKENS,
        )

    def attend(self, qkv: Tensor, heads: Heads, batch: Batch, cache: KvCache) -> Tensor:
        n, width = len(qkv), heads.head_dim
        # The longest table says how many splits there are to start; a row's own position which of them are its own.
        splits = triton.cdiv(batch.tables.shape[1] * BLOCK_TOKENS, ATTEND_SPLIT)
        group, lanes = (
            triton.next_power_of_2(heads.heads // heads.kv_heads),
            max(_NARROWEST, triton.next_power_of_2(width)),
        )
        sums = torch.empty(splits, n, heads.heads, width, device=self.device)
        weights = torch.empty(splits, n, heads.heads, 2, device=self.device)
        out = torch.empty(n, heads.heads * width, device=self.device)
        triton_kernels.attend[n, heads.kv_heads, splits](
            qkv,
            batch.positions,
            batch.tables_of,
            batch.tables,
            cache.keys,
            cache.values,
            sums,
            weights,
            n,
            batch.tables.shape[1],
            *(heads.heads, heads.kv_heads, width),
            width**-0.5,
            GROUP=group,
            DIM=lanes,
            ROWS=max(1, QUERY_LANES // group),
            KEYS=KEYS,
            SPLIT=ATTEND_SPLIT,
            BLOCK=BLOCK_TOKENS,
        )
        triton_kernels.combine[(n,)](
            *(sums, weights, batch.positions, out, n, heads.heads, width),
            *(triton.next_power_of_2(heads.heads), lanes, ATTEND_SPLIT),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        n, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(n, inner, device=self.device)
        triton_kernels.silu_mul[n, triton.cdiv(inner, SILU_COLUMNS)](gate_up, out, inner, SILU_COLUMNS)
        return out

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """On the device. `draws` are the host's, so that what must be computed is known without waiting."""
        logits = logits.to(self.device)
        greedy = logits.argmax(-1)  # the first among equals
        narrow = draws.temperatures
        ids = greedy
        if bool((narrow != 0).any()):
            drawn = _drawn(logits, draws)
            ids = torch.where(_on(narrow == 0, self.device), greedy, drawn)
        return torch.where(logits.isfinite().all(-1), ids, -1).int()


def _drawn(logits: Tensor, draws: Draws) -> Tensor:
    """Ids int64 [m] as sampler.py draws them; nonsense where the temperature is 0 or a logit is not finite.

    Probabilities are summed as whole numbers, exactly: the order of a scan, which may depend on m, changes nothing.
    """
    m, vocab = logits.shape
    device = logits.device
    u, temperature, top_p, top_k, min_p = (
        _on(each.view(m, 1), device)
        for each in (
            torch.from_numpy(noises(draws.seeds.numpy(), draws.positions.numpy())),
            torch.where(draws.temperatures == 0, 1.0, draws.temperatures),
            draws.top_ps.double(),
            torch.where((draws.top_ks > 0) & (draws.top_ks < vocab), draws.top_ks.long(), vocab),
            draws.min_ps.double(),
        )
    )
    mass = ((logits - logits.amax(-1, keepdim=True)) / temperature).clamp_min(-87.0).exp()
    units = (mass.double() * _UNIT).long()
    plain = _inverse(units, u)
    cuts = (draws.top_ps < 1) | (draws.top_ks > 0) | (draws.min_ps > 0)
    if not bool(cuts.any()):
        return plain
    sorted_mass, order = mass.sort(stable=True, dim=-1, descending=True)
    units = units.gather(-1, order)
    rank = torch.arange(vocab, device=device)
    units = units * (rank < top_k)
    total = units.cumsum(-1)
    enough = torch.searchsorted(total, (top_p * total[:, -1:]).ceil().long())
    units = units * ((rank <= enough) | (top_p >= 1)) * (sorted_mass.double() >= min_p * sorted_mass[:, :1].double())
    return torch.where(_on(cuts, device), order.gather(-1, _inverse(units, u).view(m, 1)).view(m), plain)


def _inverse(units: Tensor, u: Tensor) -> Tensor:
    """The place [m] in units [m, ids] where the fraction u [m, 1] of their sum is passed."""
    total = units.cumsum(-1)
    passed = torch.searchsorted(total, (u * total[:, -1:]).long(), right=True)
    return passed.clamp_max(units.shape[1] - 1).view(-1)


def _on(host: Tensor, device: torch.device) -> Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _pools(stacks: SlotStacks, adapted: Sequence[Sequence[Adapted]]) -> list[_Pool]:
    return [
        _Pool(
            pool,
            (pool.data, pool.data.view(torch.bfloat16), pool.data.view(torch.float16)),
            torch.from_numpy(np.array([(of.a, of.b, of.scale, of.rank, of.d, of.y) for of in matrices], np.int64)).to(
                pool.data.device
            ),
            max(of.d for of in matrices),
            max(_NARROWEST, triton.next_power_of_2(pool.rank)),
        )
        for pool, matrices in zip(stacks.pools, adapted, strict=True)
    ]
