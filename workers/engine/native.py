"""The operations in C++ (kernels.cpp) through ctypes: fused multiply-adds in a fixed order, threads that change no bit.

The same bits whatever the machine's vectors (a test compares them), hence one numeric class for every isa, and for
every number of rows in a step. Products with bfloat16 weights are computed in bfloat16 where the CPU has instructions
for it, which is a numeric class of its own (bf16.py); elsewhere such weights are widened to float32, which keeps them.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from workers.engine import bf16, pages
from workers.engine.compiled import SOURCE, library
from workers.engine.operations import Batch, Draws, Heads, KvCache, Rope, Weight
from workers.engine.stacks import Adapted, SlotStacks

_PANEL = 32


class _Adapted(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("a", "b", "scale", "rank")),
        *((name, ctypes.c_int32) for name in ("d", "y")),
    )


class _SlotPool(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("slot_floats", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("matrices", ctypes.c_void_p),
        ("first", ctypes.c_int32),
        ("slots", ctypes.c_int32),
    )


@dataclass(frozen=True)
class _Pools:
    """What the kernel is told of one projection; `kept` owns the memory that `pools` points to."""

    pools: ctypes.Array[_SlotPool]
    matrices: int
    kept: tuple[object, ...]


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "table_length")),
        *((name, ctypes.c_void_p) for name in ("positions", "tables_of", "tables")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "keys", "values")),
    )


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "engine_threads": (_INT,),
    "engine_pack": (_POINTER, _INT, _INT, _POINTER, _INT),
    "engine_embed": (_POINTER, _INT, _POINTER, _INT, _POINTER),
    "engine_linear": (_POINTER, _INT, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER),
    "engine_norm": (_POINTER, _POINTER, _POINTER, _FLOAT, _INT, _INT, _POINTER),
    "engine_project": (
        *(_POINTER, _INT, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER),
        *(_POINTER, _INT, _INT, _POINTER, _POINTER),
    ),
    "engine_rope_store": (_POINTER, _INT, _POINTER),
    "engine_attend": (_POINTER, _INT, _POINTER, _POINTER),
    "engine_silu_mul": (_POINTER, _INT, _INT, _POINTER),
    "engine_sample": (_POINTER, _INT, _INT, *(_POINTER,) * 7),
}


class NativeOperations:
    """One per process: the kernels' thread pool is global. Raises NoCompiler."""

    device = torch.device("cpu")

    def __init__(self, threads: int, isa: str) -> None:
        kernels = library(isa)
        for name, arguments in _SIGNATURES.items():
            function = getattr(kernels, name)
            function.argtypes, function.restype = arguments, None
        self._kernels = kernels
        self._pools: WeakKeyDictionary[SlotStacks, dict[int, _Pools]] = WeakKeyDictionary()  # by id of `adapted`
        kernels.engine_threads(threads)
        self.numeric_class = f"float32/native-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]}/fma16/any-width"
        self._bf16_class = ""
        if isa == "avx512bf16":
            self._bf16_class = bf16.numeric_class(lambda weight, x: self.linear(self._packed(weight), x))

    def weight(self, *parts: Tensor) -> Weight:
        if self._bf16_class and all(part.dtype is torch.bfloat16 for part in parts):
            return self._packed(*parts)
        return self._packed(*(part.float() for part in parts))

    def value_bytes(self, stored: torch.dtype) -> int:
        return 2 if self._bf16_class and stored is torch.bfloat16 else 4

    def _packed(self, *parts: Tensor) -> Weight:
        """Parts of one type, which the kernels move as elements of four bytes: a float, or two bfloat16."""
        dtype = parts[0].dtype
        d, k = sum(len(part) for part in parts), parts[0].shape[1]
        depth = k * dtype.itemsize // 4
        packed, first = pages.zeros(-(-d // _PANEL) * depth * _PANEL).view(dtype), 0
        for part in parts:
            source = part.contiguous()
            self._kernels.engine_pack(source.data_ptr(), len(part), depth, packed.data_ptr(), first)
            first += len(part)
        return Weight(packed, d, k, self._bf16_class if dtype is torch.bfloat16 else "")

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        dtype = weight.data.dtype
        out, depth = torch.empty(len(ids), weight.k, dtype=dtype), weight.k * dtype.itemsize // 4
        self._kernels.engine_embed(weight.data.data_ptr(), depth, ids.data_ptr(), len(ids), out.data_ptr())
        return out.float()

    def linear(self, weight: Weight, x: Tensor) -> Tensor:
        n = len(x)
        out, scratch = torch.empty(n, weight.d), torch.empty(n, weight.k)
        self._kernels.engine_linear(*_lies(weight), x.data_ptr(), n, out.data_ptr(), scratch.data_ptr())
        return out

    def norm(self, x: Tensor, add: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        added = None if add is None else add.data_ptr()
        self._kernels.engine_norm(x.data_ptr(), added, gain.data_ptr(), eps, *x.shape, out.data_ptr())
        return out

    def project(
        self, weight: Weight, x: Tensor, stacks: SlotStacks, adapted: Sequence[Sequence[Adapted]], batch: Batch
    ) -> Tensor:
        known = self._pools.setdefault(stacks, {})
        about = known.get(id(adapted))
        if about is None:
            about = known[id(adapted)] = _pools(stacks, adapted)
        n = len(x)
        out, scratch = torch.empty(n, weight.d), torch.empty(n, weight.k + weight.d)
        self._kernels.engine_project(
            *_lies(weight),
            x.data_ptr(),
            n,
            batch.slots.data_ptr(),
            batch.by_slot.data_ptr(),
            ctypes.addressof(about.pools),
            len(about.pools),
            about.matrices,
            out.data_ptr(),
            scratch.data_ptr(),
        )
        return out

    def rope_store(self, qkv: Tensor, heads: Heads, rope: Rope, batch: Batch, cache: KvCache) -> None:
        about = _attention(heads, batch, cache)
        about.cosine, about.sine = rope.cosine.data_ptr(), rope.sine.data_ptr()
        self._kernels.engine_rope_store(qkv.data_ptr(), len(qkv), ctypes.addressof(about))

    def attend(self, qkv: Tensor, heads: Heads, batch: Batch, cache: KvCache) -> Tensor:
        out = torch.empty(len(qkv), heads.heads * heads.head_dim)
        about = _attention(heads, batch, cache)
        self._kernels.engine_attend(qkv.data_ptr(), len(qkv), ctypes.addressof(about), out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        n, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(n, inner)
        self._kernels.engine_silu_mul(gate_up.data_ptr(), n, inner, out.data_ptr())
        return out

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        ids = torch.empty(len(logits), dtype=torch.int32)
        pointers = (tensor.data_ptr() for tensor in (*draws, ids))
        self._kernels.engine_sample(logits.data_ptr(), *logits.shape, *pointers)
        return ids


def _lies(weight: Weight) -> tuple[int, bool, int, int]:
    return weight.data.data_ptr(), weight.data.dtype is torch.bfloat16, weight.d, weight.k


def _pools(stacks: SlotStacks, adapted: Sequence[Sequence[Adapted]]) -> _Pools:
    tables, pools = [], []
    for pool, matrices in zip(stacks.pools, adapted, strict=True):
        table = (_Adapted * len(matrices))(*(_Adapted(m.a, m.b, m.scale, m.rank, m.d, m.y) for m in matrices))
        tables.append(table)
        lies = (pool.data.data_ptr(), pool.floats, pool.values)
        pools.append(_SlotPool(*lies, ctypes.addressof(table), pool.first, pool.slots))
    return _Pools((_SlotPool * len(pools))(*pools), len(adapted[0]) if adapted else 0, (*tables, adapted))


def _attention(heads: Heads, batch: Batch, cache: KvCache) -> _Attention:
    return _Attention(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        table_length=batch.tables.shape[1],
        positions=batch.positions.data_ptr(),
        tables_of=batch.tables_of.data_ptr(),
        tables=batch.tables.data_ptr(),
        keys=cache.keys.data_ptr(),
        values=cache.values.data_ptr(),
    )
