"""The RAM copy of one adapter, laid out exactly as an engine slot: a file in shared memory that the engine maps.

Owns the layout. File: a header of 4,096 bytes (magic, version, slot rank, content id, payload bytes), then the payload,
float32 little-endian: for each matrix of MATRICES in that order A [L, r, k] and B kept rank-major [L, r, d], and last
scale [7, L] (alpha / r; 0 where the adapter has nothing) and rank [7, L], how many of the r rows each uses (0: none).
r is the rank of the slots that it is for, the smallest of them that holds the adapter (`slot_rank`): what it does not
use is zero. One slot of the engine is one payload, so that loading is a single copy.

Writing is atomic (a temporary name beside the target, then a rename): a crash leaves at most a `.tmp-` file and never a
half image under its real name. A reader checks header and size before it maps anything.
"""

import mmap
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from streams.adapters.shape import MATRICES, ModelShape

Floats = npt.NDArray[np.float32]

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII32sQ")  # magic, version, slot rank, content id, payload bytes
_MAGIC, _VERSION = b"LORASLOT", 2
_FLOAT_BYTES = 4


class ImageError(Exception):
    """The file is not the image that was asked for, or the tensors do not fit the model."""


class MatrixSpan(msgspec.Struct, frozen=True):
    """Where one matrix lies in a payload, in floats: A [L, r, k] at `a`, B rank-major [L, r, d] at `b`."""

    k: int
    d: int
    a: int
    b: int


class Layout(msgspec.Struct, frozen=True):
    """Offsets of everything in a payload of `floats` floats; scale [7, L] starts at `scale`, rank [7, L] at `ranks`."""

    layers: int
    rank: int
    spans: dict[str, MatrixSpan]
    scale: int
    ranks: int
    floats: int


def slot_pools(slots: int, max_rank: int, pools: str) -> dict[int, int]:
    """Rank -> number of slots, ranks going up: as `pools` says ("8:24,16:8"), or `slots` of the largest rank.

    Raises ValueError, which says what is wrong: the largest pool must hold the largest rank that is served.
    """
    if not pools:
        return {max_rank: slots}
    found: dict[int, int] = {}
    for pair in pools.split(","):
        rank, _, count = pair.partition(":")
        if not (rank.isdecimal() and count.isdecimal() and int(rank) and int(count)) or int(rank) in found:
            raise ValueError(f"{pair!r} is not rank:slots with two numbers above 0, each rank once")
        found[int(rank)] = int(count)
    if max(found) != max_rank:
        raise ValueError(f"the largest rank is {max(found)}, it must be the largest that is served, {max_rank}")
    return dict(sorted(found.items()))


def slot_rank(rank: int, slot_ranks: Collection[int]) -> int:
    """The smallest rank of slots that holds an adapter of this rank. Raises ImageError."""
    fitting = [each for each in slot_ranks if each >= rank]
    if not fitting:
        raise ImageError(f"rank {rank} is larger than every slot's: {', '.join(map(str, sorted(slot_ranks)))}")
    return min(fitting)


def layout(shape: ModelShape, max_rank: int) -> Layout:
    """The payload's layout for this model and slot rank."""
    at, spans = 0, {}
    for name, (k, d) in shape.matrices().items():
        b = at + shape.layers * max_rank * k
        spans[name] = MatrixSpan(k=k, d=d, a=at, b=b)
        at = b + shape.layers * max_rank * d
    each = len(MATRICES) * shape.layers
    return Layout(shape.layers, max_rank, spans, at, at + each, at + 2 * each)


def image_bytes(shape: ModelShape, max_rank: int) -> int:
    """The size of one image file."""
    return HEADER_BYTES + layout(shape, max_rank).floats * _FLOAT_BYTES


def write_image(
    path: Path,
    shape: ModelShape,
    max_rank: int,
    content_id: str,
    tensors: Mapping[tuple[int, str], tuple[Floats, Floats, float]],
) -> None:
    """Writes the image of one adapter: (layer, matrix) -> A [r', k], B [d, r'], scale, with r' <= max_rank.

    Raises ImageError for a tensor that does not fit, OSError when shared memory is full; neither leaves a file.
    """
    plan = layout(shape, max_rank)
    scale, ranks = np.zeros((2, len(MATRICES), shape.layers), np.float32)
    header = _HEADER.pack(_MAGIC, _VERSION, max_rank, _raw_id(content_id), plan.floats * _FLOAT_BYTES)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as file:
            # Shared memory keeps what is never written as free zeros: only what the adapter has is written.
            file.truncate(HEADER_BYTES + plan.floats * _FLOAT_BYTES)
            file.write(header)
            for (layer, matrix), (a, b, factor) in tensors.items():
                span = _checked(plan, layer, matrix, a, b, factor)
                rank = a.shape[0]
                _write_at(file.fileno(), span.a + layer * max_rank * span.k, a)
                _write_at(file.fileno(), span.b + layer * max_rank * span.d, b.T)
                used = rank if factor else 0
                scale[MATRICES.index(matrix), layer] = factor if used else 0.0
                ranks[MATRICES.index(matrix), layer] = used
            _write_at(file.fileno(), plan.scale, scale)
            _write_at(file.fileno(), plan.ranks, ranks)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class SlotImage:
    """A mapped image, read-only. `payload` is the flat float32 view that a slot takes over as it is."""

    def __init__(self, mapped: mmap.mmap, plan: Layout) -> None:
        self._mapped = mapped
        self._plan = plan
        self.rank = plan.rank
        self.payload: Floats = np.frombuffer(mapped, np.float32, plan.floats, HEADER_BYTES)

    def a(self, matrix: str) -> Floats:
        """A [L, r, k] of one matrix."""
        span, plan = self._plan.spans[matrix], self._plan
        return self.payload[span.a : span.b].reshape(plan.layers, plan.rank, span.k)

    def b(self, matrix: str) -> Floats:
        """B [L, d, r] of one matrix: a transposed view of the rank-major storage."""
        span, plan = self._plan.spans[matrix], self._plan
        stored = self.payload[span.b : span.b + plan.layers * plan.rank * span.d]
        return stored.reshape(plan.layers, plan.rank, span.d).swapaxes(1, 2)

    def scale(self) -> Floats:
        """scale [7, L], rows in the order of MATRICES."""
        return self.payload[self._plan.scale : self._plan.ranks].reshape(len(MATRICES), self._plan.layers)

    def ranks(self) -> Floats:
        """rank [7, L], whole numbers, rows in the order of MATRICES."""
        return self.payload[self._plan.ranks :].reshape(len(MATRICES), self._plan.layers)


class Header(msgspec.Struct, frozen=True):
    """The rank of the slots that an image is for, and the bytes of its payload."""

    rank: int
    payload_bytes: int


def check_header(path: Path, content_id: str, *slot_ranks: int) -> Header:
    """The header of the image at `path`. Raises ImageError when it is another content, rank or format."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ImageError(f"cannot read the image: {error.strerror}") from error
    if len(raw) < _HEADER.size:
        raise ImageError(f"the image has {len(raw)} bytes, less than its header")
    magic, version, rank, content, payload = _HEADER.unpack(raw)
    if magic != _MAGIC or version != _VERSION:
        raise ImageError(f"magic {magic!r} version {version} is not {_MAGIC!r} version {_VERSION}")
    if content != _raw_id(content_id):
        raise ImageError(f"the image holds content {content.hex()}, not {content_id}")
    if rank not in slot_ranks:
        raise ImageError(f"the image is laid out for rank {rank}, the slots for {', '.join(map(str, slot_ranks))}")
    if size != HEADER_BYTES + payload:
        raise ImageError(f"the image has {size} bytes, its header says {HEADER_BYTES + payload}")
    return Header(int(rank), int(payload))


def open_image(path: Path, content_id: str, shape: ModelShape, *slot_ranks: int) -> SlotImage:
    """Maps the image. Raises ImageError when header or size differ from what is asked for."""
    header = check_header(path, content_id, *slot_ranks)
    plan = layout(shape, header.rank)
    if header.payload_bytes != plan.floats * _FLOAT_BYTES:
        raise ImageError(
            f"the image's payload has {header.payload_bytes} bytes, this model's slots {plan.floats * _FLOAT_BYTES}"
        )
    with open(path, "rb") as file:
        return SlotImage(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), plan)


def _raw_id(content_id: str) -> bytes:
    try:
        raw = bytes.fromhex(content_id)
    except ValueError as error:
        raise ImageError(f"content id {content_id!r} is not hexadecimal") from error
    if len(raw) != 32:
        raise ImageError(f"content id {content_id!r} is not a sha256 in hexadecimal")
    return raw


def _checked(plan: Layout, layer: int, matrix: str, a: Floats, b: Floats, factor: float) -> MatrixSpan:
    where = f"layer {layer} matrix {matrix!r}"
    if matrix not in plan.spans or not 0 <= layer < plan.layers:
        raise ImageError(f"{where}: the model has no such matrix")
    span = plan.spans[matrix]
    if a.dtype != np.float32 or b.dtype != np.float32:
        raise ImageError(f"{where}: A is {a.dtype} and B {b.dtype}, expected float32")
    rank = a.shape[0]
    if a.shape != (rank, span.k) or b.shape != (span.d, rank) or rank > plan.rank:
        raise ImageError(f"{where}: A {a.shape} B {b.shape} do not fit [r, {span.k}] [{span.d}, r], r <= {plan.rank}")
    if not np.isfinite(factor):
        raise ImageError(f"{where}: scale {factor} is not finite")
    return span


def _write_at(descriptor: int, floats: int, values: Floats) -> None:
    data = np.ascontiguousarray(values, "<f4").data.cast("B")
    at = HEADER_BYTES + floats * _FLOAT_BYTES
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
