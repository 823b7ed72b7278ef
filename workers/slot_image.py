"""The RAM copy of one adapter, laid out exactly as an engine slot: a file in shared memory that the engine reads.

Owns the layout. File: a header of 4,096 bytes (magic, version, slot rank, content id, payload bytes), then the payload,
little-endian. It begins with float32: the precision of the values, scale [7, L] (alpha / r; 0 where the adapter has
nothing) and rank [7, L], how many of the r rows each uses (0: none). Then, from `Layout.values` on, for each matrix of
MATRICES in that order A [L, r, k] and B kept rank-major [L, r, d], in that precision.
r is the rank of the slots that it is for, the smallest of them that holds the adapter (`slot_rank`): what it does not
use is zero. One slot of the engine has room for the payload in float32 and begins with it, so that loading is a single
copy. An adapter takes 16 bits a value wherever that keeps each of its values to the bit: it is computed with in float32
all the same, so a precision changes what is read and never what comes out.

Writing is atomic (a temporary name beside the target, then a rename): a crash leaves at most a `.tmp-` file and never a
half image under its real name. A reader checks header and size first, and never maps the file: a mapped one that was
cut, or a hole in it while shared memory is full, would end the process with SIGBUS, and every sequence with it.
"""

import contextlib
import os
import stat
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from streams.adapters.shape import MATRICES, ModelShape

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Stored = npt.NDArray[np.generic]  # of a precision: float32, float16, or the upper halves of float32

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII32sQ")  # magic, version, slot rank, content id, payload bytes
_MAGIC, _VERSION = b"LORASLOT", 3
_FLOAT_BYTES = 4
_ALIGN_FLOATS = 16
MAX_RANK = 512  # of a slot: the kernels keep a row's low-rank values on the stack, kernels.cpp has the same number


class Precision(IntEnum):
    """How the values of A and B lie in a payload; kernels.cpp and triton_kernels.py have the same numbers."""

    F32 = 1
    BF16 = 2
    F16 = 3

    @property
    def bytes(self) -> int:
        return 4 if self is Precision.F32 else 2


class ImageError(Exception):
    """The file is not the image that was asked for, or the tensors do not fit the model."""


class MatrixSpan(msgspec.Struct, frozen=True):
    """Where one matrix lies behind `Layout.values`, in values: A [L, r, k] at `a`, B rank-major [L, r, d] at `b`."""

    k: int
    d: int
    a: int
    b: int


class Layout(msgspec.Struct, frozen=True):
    """Where what lies in a payload, in floats: scale [7, L] at `scale`, rank [7, L] at `ranks`, A and B at `values`.

    The precision is the first float. `count`: values of A and B.
    """

    layers: int
    rank: int
    spans: dict[str, MatrixSpan]
    scale: int
    ranks: int
    values: int
    count: int

    @property
    def floats(self) -> int:
        """The size of a payload whose values are float32."""
        return self.values + self.count

    @property
    def slot_floats(self) -> int:
        """The size of a slot, which such a payload fits."""
        return -(-self.floats // _ALIGN_FLOATS) * _ALIGN_FLOATS

    def bytes(self, precision: Precision) -> int:
        """The size of a payload."""
        return self.values * _FLOAT_BYTES + self.count * precision.bytes


def slot_pools(slots: int, max_rank: int, pools: str) -> dict[int, int]:
    """Rank -> number of slots, ranks going up: as `pools` says ("8:24,16:8"), or `slots` of the largest rank.

    Raises ValueError, which says what is wrong: the largest pool must hold the largest rank that is served.
    """
    if max_rank > MAX_RANK:
        raise ValueError(f"the largest rank that is served is {max_rank}, slots have at most {MAX_RANK}")
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
    values = -(-(1 + 2 * each) // _ALIGN_FLOATS) * _ALIGN_FLOATS
    return Layout(shape.layers, max_rank, spans, 1, 1 + each, values, at)


def image_bytes(shape: ModelShape, max_rank: int, precision: Precision) -> int:
    """The size of one image file."""
    return HEADER_BYTES + layout(shape, max_rank).bytes(precision)


def write_image(
    path: Path,
    shape: ModelShape,
    max_rank: int,
    content_id: str,
    tensors: Mapping[tuple[int, str], tuple[Floats, Floats, float]],
    precision: Precision | None = None,
) -> None:
    """Writes the image of one adapter: (layer, matrix) -> A [r', k], B [d, r'], scale, with r' <= max_rank.

    `precision`: the first of BF16, F16 and F32 that keeps every value, unless said. Raises ImageError for a tensor that
    does not fit or is not exact in it, OSError when shared memory is full; neither leaves a file.
    """
    plan = layout(shape, max_rank)
    for layer, matrix in tensors:
        _checked(plan, layer, matrix, *tensors[layer, matrix])
    if precision is None:
        precision = next(each for each in _NARROWEST_FIRST if _exact(tensors, each))
    elif not _exact(tensors, precision):
        raise ImageError(f"there are values that {precision.name} does not keep")
    narrowed = _NARROWED[precision]
    with new_image(path, shape, max_rank, content_id, precision) as image:
        for (layer, matrix), (a, b, factor) in tensors.items():
            image.put(layer, matrix, narrowed(a), narrowed(b), factor)


class NewImage:
    """An image on its way: what is put into it stands there in the precision that it was opened with."""

    def __init__(self, descriptor: int, plan: Layout, precision: Precision) -> None:
        self._descriptor, self._plan, self._precision = descriptor, plan, precision
        self._scale, self._ranks = np.zeros((2, len(MATRICES), plan.layers), np.float32)

    def put(self, layer: int, matrix: str, a: Stored, b: Stored, factor: float) -> None:
        """One matrix: A [r', k], B [d, r'] and scale. Raises ImageError for a tensor that does not fit."""
        plan, width = self._plan, self._precision.bytes
        _checked(plan, layer, matrix, a, b, factor, _STORED[self._precision])
        span, rank = plan.spans[matrix], a.shape[0]
        for at, values in (
            (span.a + layer * plan.rank * span.k, a),
            (span.b + layer * plan.rank * span.d, np.ascontiguousarray(b.T)),
        ):
            _write_at(self._descriptor, plan.values * _FLOAT_BYTES + at * width, values)
        used = rank if factor else 0
        self._scale[MATRICES.index(matrix), layer] = factor if used else 0.0
        self._ranks[MATRICES.index(matrix), layer] = used

    def end(self) -> None:
        """What stands before the values."""
        plan = self._plan
        for at, floats in ((0, np.array(self._precision)), (plan.scale, self._scale), (plan.ranks, self._ranks)):
            _write_at(self._descriptor, at * _FLOAT_BYTES, floats.astype("<f4"))


@contextlib.contextmanager
def new_image(
    path: Path, shape: ModelShape, max_rank: int, content_id: str, precision: Precision
) -> Iterator[NewImage]:
    """The image at `path`, there from the end of the context on; an error in it leaves no file."""
    plan = layout(shape, max_rank)
    header = _HEADER.pack(_MAGIC, _VERSION, max_rank, _raw_id(content_id), plan.bytes(precision))
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb", buffering=0) as file:
            # Shared memory keeps what is never written as free zeros: only what the adapter has is written.
            file.truncate(HEADER_BYTES + plan.bytes(precision))
            file.write(header)
            image = NewImage(file.fileno(), plan, precision)
            yield image
            image.end()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class SlotImage:
    """An open image, whose file lives as long as this. What reads it raises ImageError if the file was cut since."""

    def __init__(self, file: "_File", plan: Layout, precision: Precision) -> None:
        self._file = file
        self._plan = plan
        self.rank, self.precision = plan.rank, precision

    @property
    def payload_bytes(self) -> int:
        return self._plan.bytes(self.precision)

    def copy_to(self, memory: Bytes) -> None:
        """The payload, which a slot takes over as it is."""
        self._file.read_into(memory, HEADER_BYTES)

    def a(self, layer: int, matrix: str) -> Floats:
        """A [r, k] of one matrix, in float32."""
        span = self._plan.spans[matrix]
        return self._values(span.a + layer * self.rank * span.k, span.k)

    def b(self, layer: int, matrix: str) -> Floats:
        """B [d, r] of one matrix, in float32."""
        span = self._plan.spans[matrix]
        return self._values(span.b + layer * self.rank * span.d, span.d).T

    def scale(self) -> Floats:
        """scale [7, L], rows in the order of MATRICES."""
        return self._floats(self._plan.scale)

    def ranks(self) -> Floats:
        """rank [7, L], whole numbers, rows in the order of MATRICES."""
        return self._floats(self._plan.ranks)

    def _floats(self, at: int) -> Floats:
        size = len(MATRICES) * self._plan.layers * _FLOAT_BYTES
        return self._read(at * _FLOAT_BYTES, size).view("<f4").reshape(len(MATRICES), -1)

    def _values(self, at: int, columns: int) -> Floats:
        start, width = self._plan.values * _FLOAT_BYTES + at * self.precision.bytes, self.precision.bytes
        return _WIDENED[self.precision](self._read(start, self.rank * columns * width)).reshape(-1, columns)

    def _read(self, at: int, size: int) -> Bytes:
        memory = np.empty(size, np.uint8)
        self._file.read_into(memory, HEADER_BYTES + at)
        return memory


class _File:
    """A file open for reading until nobody has it any more."""

    def __init__(self, path: Path) -> None:
        try:
            # A pipe without a writer would be waited for.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ImageError(f"cannot read the image: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        told = os.fstat(self._descriptor)
        if not stat.S_ISREG(told.st_mode):
            raise ImageError("the image is no regular file")
        self.size = told.st_size

    def read_into(self, memory: Bytes, at: int) -> None:
        """Fills `memory` from there on. Raises ImageError if the file ends before."""
        left = memory.data
        while left:
            try:
                count = os.preadv(self._descriptor, [left], at)
            except OSError as error:
                raise ImageError(f"cannot read the image: {error.strerror}") from error
            if not count:
                raise ImageError(f"the image was cut while it was read: {len(left)} bytes are missing")
            left, at = left[count:], at + count


class Header(msgspec.Struct, frozen=True):
    """The rank of the slots that an image is for, and the bytes of its payload."""

    rank: int
    payload_bytes: int


def check_header(path: Path, content_id: str, *slot_ranks: int) -> Header:
    """The header of the image at `path`. Raises ImageError when it is another content, rank or format."""
    return _header(_File(path), content_id, slot_ranks)


def _header(file: _File, content_id: str, slot_ranks: Collection[int]) -> Header:
    size = file.size
    if size < _HEADER.size:
        raise ImageError(f"the image has {size} bytes, less than its header")
    raw = np.empty(_HEADER.size, np.uint8)
    file.read_into(raw, 0)
    magic, version, rank, content, payload = _HEADER.unpack(raw.tobytes())
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
    """Opens the image. Raises ImageError when header, size, ranks or scales are not what they can be."""
    file = _File(path)
    header = _header(file, content_id, slot_ranks)
    plan = layout(shape, header.rank)
    first = np.zeros(1, "<f4")
    if header.payload_bytes >= _FLOAT_BYTES:
        file.read_into(first.view(np.uint8), HEADER_BYTES)
    told = float(first[0])
    if told not in tuple(Precision):
        raise ImageError(f"the image's values have the unknown precision {told}")
    precision = Precision(int(told))
    if header.payload_bytes != plan.bytes(precision):
        raise ImageError(
            f"the image's payload has {header.payload_bytes} bytes, this model's in {precision.name} "
            f"{plan.bytes(precision)}"
        )
    image = SlotImage(file, plan, precision)
    ranks, scale = image.ranks(), image.scale()
    # The kernels take these as they are: a rank beyond the slot's would be read out of another matrix.
    if not (np.isin(ranks, np.arange(plan.rank + 1)).all() and np.isfinite(scale).all()):
        raise ImageError(f"the image's ranks are not all whole numbers up to {plan.rank}, or a scale is not finite")
    return image


def _raw_id(content_id: str) -> bytes:
    try:
        raw = bytes.fromhex(content_id)
    except ValueError as error:
        raise ImageError(f"content id {content_id!r} is not hexadecimal") from error
    if len(raw) != 32:
        raise ImageError(f"content id {content_id!r} is not a sha256 in hexadecimal")
    return raw


def _checked(plan: Layout, layer: int, matrix: str, a: Stored, b: Stored, factor: float, dtype: str = "<f4") -> None:
    where = f"layer {layer} matrix {matrix!r}"
    if matrix not in plan.spans or not 0 <= layer < plan.layers:
        raise ImageError(f"{where}: the model has no such matrix")
    span = plan.spans[matrix]
    if a.dtype != dtype or b.dtype != dtype:
        raise ImageError(f"{where}: A is {a.dtype} and B {b.dtype}, expected {np.dtype(dtype)}")
    rank = a.shape[0]
    if a.shape != (rank, span.k) or b.shape != (span.d, rank) or rank > plan.rank:
        raise ImageError(f"{where}: A {a.shape} B {b.shape} do not fit [r, {span.k}] [{span.d}, r], r <= {plan.rank}")
    if not np.isfinite(factor):
        raise ImageError(f"{where}: scale {factor} is not finite")


def _bits16(values: Floats) -> npt.NDArray[np.uint16]:
    return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2")


def _half(values: Floats) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):  # what does not fit is infinite, hence not exact
        return np.ascontiguousarray(values, "<f4").astype("<f2")


_STORED = {Precision.F32: "<f4", Precision.BF16: "<u2", Precision.F16: "<f2"}
_NARROWEST_FIRST = (Precision.BF16, Precision.F16, Precision.F32)
_NARROWED: dict[Precision, Callable[[Floats], npt.NDArray[np.generic]]] = {
    Precision.F32: lambda values: np.ascontiguousarray(values, "<f4"),
    Precision.BF16: _bits16,
    Precision.F16: _half,
}
_WIDENED: dict[Precision, Callable[[Bytes], Floats]] = {
    Precision.F32: lambda stored: stored.view("<f4"),
    Precision.BF16: lambda stored: (stored.view("<u2").astype("<u4") << 16).view("<f4"),
    Precision.F16: lambda stored: stored.view("<f2").astype("<f4"),
}


def _exact(tensors: Mapping[tuple[int, str], tuple[Floats, Floats, float]], precision: Precision) -> bool:
    """Whether every value comes back to the bit."""

    def kept(values: Floats) -> bool:
        whole = np.ascontiguousarray(values, "<f4")
        back = _WIDENED[precision](_NARROWED[precision](whole).reshape(-1).view(np.uint8))
        return bool((back.view(np.uint32) == whole.reshape(-1).view(np.uint32)).all())

    return all(kept(a) and kept(b) for a, b, _ in tensors.values())


def _write_at(descriptor: int, at: int, values: npt.NDArray[np.generic]) -> None:
    data = values.reshape(-1).view(np.uint8).data
    at += HEADER_BYTES
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
