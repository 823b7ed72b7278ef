"""The one file that a worker may load: written by the registry, deterministic to the byte, read back verified.

safetensors with tensors `layers.{i}.{matrix}.{A|B}`, unscaled, in the narrowest of BF16, F16 and F32 that keeps every
value, the data starting on a page. The metadata carries the format's version, the content id, the base's hash and each
matrix's scale. A file cut short by a crash does not read: its content id differs.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from streams.adapters.content import content_id
from streams.adapters.delta import Array, Delta, Place, ordered
from streams.adapters.shape import MATRICES, ModelShape
from streams.adapters.tensors import BadFile, Header, read_header

FORMAT = "lorafleet-adapter-1"
_PAGE = 4096
_RAW = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_BLOCK_BYTES, _AHEAD = 1 << 20, 4  # what is read at a time, and how many of those may wait for their sum

Raw = npt.NDArray[np.generic]


def write_canonical(path: Path, delta: Delta, base_hash: str) -> str:
    """Writes the file (not atomically: give a path of your own) and returns the content id."""
    identity = content_id(delta, base_hash)
    tensors = [
        (f"layers.{layer}.{matrix}.{half}", values)
        for layer, matrix in ordered(delta)
        for half, values in (("A", delta[layer, matrix].a), ("B", delta[layer, matrix].b))
    ]
    dtype, encode = _narrowest([values for _, values in tensors])
    width = 4 if dtype == "F32" else 2
    entries: dict[str, object] = {
        "__metadata__": {
            "format": FORMAT,
            "content_id": identity,
            "base_hash": base_hash,
            "scales": json.dumps({f"{i}.{matrix}": delta[i, matrix].scale for i, matrix in ordered(delta)}),
        }
    }
    at = 0
    for name, values in tensors:
        end = at + values.size * width
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _PAGE)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, values in tensors:
            file.write(encode(values))
    return identity


class Stored(NamedTuple):
    """A [r, k] and B [d, r] of one matrix as the file has them (BF16: the upper halves of float32), and their scale."""

    a: Raw
    b: Raw
    scale: float


def read_canonical(
    path: Path, identity: str, checksum: str, base_hash: str, shape: ModelShape
) -> Generator[tuple[Place, Stored]]:
    """Each matrix of the adapter, in the file's own order. Raises OSError if it does not open, and BadFile, at the
    latest at the end, where it is known whether the sha256 is `checksum`: until then nothing of it can be relied on.

    path: a file of this machine; identity and checksum: those of its record; base_hash: that of the base served here.
    What is given is overwritten some steps later. The sum is computed beside whoever uses the values, in a thread.
    """
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "checksum") as beside:
        header = _header(file, identity, base_hash)
        blocks = list(_blocks(_spans(header, shape)))
        digest = hashlib.sha256(header.raw)
        buffers = [bytearray(max(_size(block) for block in blocks)) for _ in range(min(_AHEAD, len(blocks)))]
        summing: deque[Future[None]] = deque()
        for number, block in enumerate(blocks):
            if len(summing) == len(buffers):
                summing.popleft().result()
            memory = memoryview(buffers[number % len(buffers)])[: _size(block)]
            _fill(file, memory)
            summing.append(beside.submit(digest.update, memory))
            for span in block:
                a, b, memory = memory[: span.cut], memory[span.cut : span.size], memory[span.size :]
                of_a, of_b = np.frombuffer(a, span.dtype), np.frombuffer(b, span.dtype)
                yield span.place, Stored(of_a.reshape(span.a), of_b.reshape(span.b), span.scale)
        for one in summing:
            one.result()
        if (found := digest.hexdigest()) != checksum:
            raise BadFile(f"its sha256 is {found}; {checksum} is needed")


def check_header(path: Path, identity: str, base_hash: str) -> None:
    """Whether the file is whole and says that it is this adapter; its values are not read. Raises BadFile, OSError."""
    with path.open("rb") as file:
        _header(file, identity, base_hash)


class Form(NamedTuple):
    """The largest rank of its matrices, and the dtype of its values: BF16, F16 or F32."""

    rank: int
    dtype: str


def canonical_form(path: Path) -> Form:
    """As the file's header says; nothing else is checked. Raises BadFile, OSError."""
    with path.open("rb") as file:
        entries = read_header(file).entries
    rank = max((entry.shape[0] for name, entry in entries.items() if name.endswith(".A") and entry.shape), default=0)
    dtypes = {entry.dtype for entry in entries.values()}
    return Form(rank, dtypes.pop() if len(dtypes) == 1 else "F32")


def _header(file: BinaryIO, identity: str, base_hash: str) -> Header:
    header = read_header(file)
    for field, expected in (("format", FORMAT), ("base_hash", base_hash), ("content_id", identity)):
        if header.metadata.get(field) != expected:
            raise BadFile(f"its {field} is {header.metadata.get(field)!r}; {expected!r} is needed")
    return header


class _Span(NamedTuple):
    """The bytes of one matrix, which follow on those of the one before it. `cut`: where B begins."""

    place: Place
    a: tuple[int, ...]
    b: tuple[int, ...]
    scale: float
    dtype: str
    cut: int
    size: int


def _spans(header: Header, shape: ModelShape) -> Iterator[_Span]:
    """What the file's header promises, checked against the base. Raises BadFile."""
    scales, entries = _scales(header.metadata.get("scales", "")), header.entries
    dtypes = {entry.dtype for entry in entries.values()}
    if not scales or len(dtypes) != 1 or len(entries) != 2 * len(scales):
        raise BadFile("it has no tensors, tensors of several dtypes, or some without a scale")
    at, sizes = len(header.raw), shape.matrices()
    for (layer, matrix), scale in ((place, scales[place]) for place in ordered(scales)):
        a, b = (entries.get(f"layers.{layer}.{matrix}.{half}") for half in "AB")
        k, d = sizes[matrix]
        if a is None or b is None or not 0 <= layer < shape.layers:
            raise BadFile(f"layer {layer} {matrix} is not whole, or not in the base")
        if len(a.shape) != 2 or a.shape[1] != k or b.shape != (d, a.shape[0]):
            raise BadFile(f"layer {layer} {matrix} has shapes {a.shape} and {b.shape}, not of this base")
        if (a.start, b.start) != (at, a.end):
            raise BadFile(f"layer {layer} {matrix} is not where it belongs")
        yield _Span((layer, matrix), a.shape, b.shape, scale, _RAW[a.dtype], a.end - a.start, b.end - a.start)
        at = b.end


def _blocks(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Of at least _BLOCK_BYTES each but the last: a thread that is handed less is handed it too often."""
    block: list[_Span] = []
    for span in spans:
        block.append(span)
        if _size(block) >= _BLOCK_BYTES:
            yield block
            block = []
    if block:
        yield block


def _size(block: list[_Span]) -> int:
    return sum(span.size for span in block)


def _fill(file: RawIOBase, memory: memoryview) -> None:
    """The file's next bytes. Raises BadFile when it has shrunk or the disk fails."""
    while memory:
        try:
            count = file.readinto(memory)
        except OSError as error:
            raise BadFile(f"it cannot be read: {error.strerror}") from None
        if not count:
            raise BadFile("truncated while it was read")
        memory = memory[count:]


def _scales(text: str) -> dict[Place, float]:
    try:
        raw = json.loads(text)
        split = {key: key.split(".") for key in raw}
        scales = {(int(layer), matrix): float(raw[key]) for key, (layer, matrix) in split.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise BadFile(f"its scales do not read: {error}") from None
    if any(matrix not in MATRICES for _, matrix in scales):
        raise BadFile("its scales name an unknown matrix")
    return scales


def _narrowest(tensors: list[Array]) -> tuple[str, Callable[[Array], bytes]]:
    """A pure function of the values, so that equal contents give equal files whatever dtype they came in."""
    if all(not (values.view(np.uint32) & 0xFFFF).any() for values in tensors):
        return "BF16", lambda values: (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        if all((values.astype(np.float16).astype(np.float32) == values).all() for values in tensors):
            return "F16", lambda values: values.astype("<f2").tobytes()
    return "F32", lambda values: values.astype("<f4").tobytes()
