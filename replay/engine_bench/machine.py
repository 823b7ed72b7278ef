"""What this machine can do at best, measured beside what is compared with it, and the limit that follows."""

import time
from collections.abc import Callable

import msgspec
import torch

from streams.adapters.shape import ModelShape
from workers.engine.native import NativeOperations
from workers.engine.operations import Operations

_STREAM_FLOATS = 1 << 27  # 512 MiB: beyond every cache
_TRIES = 5
FORMULA = (
    "limit s = max(FLOPs / best GEMM rate, bytes / best bandwidth); prompts read in one pass, then a step per token"
)


class Best(msgspec.Struct, frozen=True):
    """The best seen over all tries: products of 32 or 128 rows with the model's shapes, and reading 512 MiB."""

    gflops: float
    gbytes_s: float


class Limit(msgspec.Struct, frozen=True):
    """The least a run could take: `seconds`, and which of the two decides."""

    flops: float
    bytes: float
    seconds: float
    by: str
    tokens_s: float


def measure(shape: ModelShape, operations: Operations, threads: int, before: Best | None = None) -> Best:
    """Of torch's and our own product, and of torch's and our own reading, the best; and of `before`."""
    gflops = gbytes = 0.0
    stream = torch.ones(_STREAM_FLOATS)
    matrix = torch.ones(_STREAM_FLOATS // 512, 512)
    own = operations.weight(matrix) if isinstance(operations, NativeOperations) else None
    vector = torch.ones(1, 512)
    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(_TRIES):
            gbytes = max(gbytes, _STREAM_FLOATS * 4 / _seconds(lambda: stream.sum()) / 1e9)
            if own is not None:
                gbytes = max(gbytes, _STREAM_FLOATS * 4 / _seconds(lambda: operations.linear(own, vector)) / 1e9)
        sizes = set(shape.matrices().values()) | {(shape.hidden, shape.vocab)}
        for k, d in sizes:
            w = torch.randn(d, k)
            packed = operations.weight(w)
            for rows in (32, 128):
                x = torch.randn(rows, k)
                columns = x.T.contiguous()
                for _ in range(_TRIES * 2):
                    took = min(_seconds(lambda: operations.linear(packed, x)), _seconds(lambda: torch.mm(w, columns)))  # noqa: B023
                    gflops = max(gflops, 2.0 * rows * d * k / took / 1e9)
    finally:
        torch.set_num_threads(was)
    if before is not None:
        gflops, gbytes = max(gflops, before.gflops), max(gbytes, before.gbytes_s)
    return Best(gflops, gbytes)


def base_parameters(shape: ModelShape) -> tuple[int, int]:
    """(of the layers' matrices, of the head)."""
    return shape.layers * sum(k * d for k, d in shape.matrices().values()), shape.hidden * shape.vocab


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    return shape.layers * rank * sum(k + d for k, d in shape.matrices().values())


def limit(shape: ModelShape, best: Best, requests: int, prompt: int, output: int, adapters: int, rank: int) -> Limit:
    """Of `requests` at once, each with `prompt` tokens in and `output` out, `adapters` different ones in all."""
    layers, head = base_parameters(shape)
    low = adapter_parameters(shape, rank) if adapters else 0
    computed = requests * (prompt + output - 1)
    positions = requests * sum(range(1, prompt + output))
    attention = 4 * shape.layers * shape.heads * shape.head_dim * positions
    flops = 2 * computed * (layers + low) + 2 * requests * output * head + attention
    per_position = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    cached = per_position * requests * sum(range(prompt, prompt + output))
    size = output * 4 * (layers + head + adapters * low) + cached
    return _limit(float(flops), float(size), best, requests * output)


def _limit(flops: float, size: float, best: Best, tokens: int) -> Limit:
    arithmetic, memory = flops / best.gflops / 1e9, size / best.gbytes_s / 1e9
    seconds = max(arithmetic, memory)
    return Limit(flops, size, seconds, "arithmetic" if arithmetic >= memory else "memory", tokens / seconds)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
