"""The RAM copy of one adapter, laid out exactly as an engine slot: a file in shared memory that the engine maps.

Owns the layout. File: a header of 4,096 bytes (magic, version, slot rank, content id, payload bytes), then the payload,
float32 little-endian: for each matrix of MATRICES in that order A [L, r, k] and B kept rank-major [L, r, d], and last
scale [7, L] (alpha / r; 0 where the adapter has nothing). r is the fleet's largest rank: smaller ranks are padded with
zeros, absent layers and matrices are zero. One slot of the engine is one payload, so that loading is a single copy.

Writing is atomic (a temporary name beside the target, then a rename): a crash leaves at most a `.tmp-` file and never a
half image under its real name. A reader checks header and size before it maps anything.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from streams.adapters.shape import MATRICES, ModelShape

Floats = npt.NDArray[np.float32]

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII32sQ")  # magic, version, slot rank, content id, payload bytes
_MAGIC, _VERSION = b"LORASLOT", 1
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
    """Offsets of everything in a payload of `floats` floats; scale [7, L] starts at `scale`."""

    layers: int
    rank: int
    spans: dict[str, MatrixSpan]
    scale: int
    floats: int


def layout(shape: ModelShape, max_rank: int) -> Layout:
    """The payload's layout for this model and slot rank."""
    at, spans = 0, {}
    for name, (k, d) in shape.matrices().items():
        b = at + shape.layers * max_rank * k
        spans[name] = MatrixSpan(k=k, d=d, a=at, b=b)
        at = b + shape.layers * max_rank * d
    return Layout(shape.layers, max_rank, spans, at, at + len(MATRICES) * shape.layers)


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
    scale = np.zeros((len(MATRICES), shape.layers), np.float32)
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
                scale[MATRICES.index(matrix), layer] = factor if rank else 0.0
            _write_at(file.fileno(), plan.scale, scale)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class SlotImage:
    """A mapped image, read-only. `payload` is the flat float32 view that a slot takes over as it is."""

    def __init__(self, mapped: mmap.mmap, plan: Layout) -> None:
        self._mapped = mapped
        self._plan = plan
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
        return self.payload[self._plan.scale :].reshape(len(MATRICES), self._plan.layers)


def check_header(path: Path, content_id: str, max_rank: int) -> int:
    """Payload bytes of the image at `path`. Raises ImageError when it is another content, rank or format."""
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
    if rank != max_rank:
        raise ImageError(f"the image is laid out for rank {rank}, the slots for {max_rank}")
    if size != HEADER_BYTES + payload:
        raise ImageError(f"the image has {size} bytes, its header says {HEADER_BYTES + payload}")
    return int(payload)


def open_image(path: Path, content_id: str, shape: ModelShape, max_rank: int) -> SlotImage:
    """Maps the image. Raises ImageError when header or size differ from what is asked for."""
    payload = check_header(path, content_id, max_rank)
    plan = layout(shape, max_rank)
    if payload != plan.floats * _FLOAT_BYTES:
        raise ImageError(f"the image's payload has {payload} bytes, this model's slots {plan.floats * _FLOAT_BYTES}")
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
