"""The one file that a worker may load: written by the registry, deterministic to the byte, read back verified.

safetensors with tensors `layers.{i}.{matrix}.{A|B}`, unscaled, in the narrowest of BF16, F16 and F32 that keeps every
value, the data starting on a page. The metadata carries the format's version, the content id, the base's hash and each
matrix's scale. A file cut short by a crash does not read: its content id differs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from streams.adapters.content import content_id
from streams.adapters.delta import Array, Delta, Pair, Place, ordered
from streams.adapters.shape import MATRICES, ModelShape
from streams.adapters.tensors import BadFile, Header, read_header, read_tensor

FORMAT = "lorafleet-adapter-1"
_PAGE = 4096


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


def read_canonical(path: Path, identity: str, base_hash: str, shape: ModelShape) -> Delta:
    """The adapter in the file, its content id computed anew over every value. Raises BadFile.

    path: a file of this machine; identity: the content id its record names; base_hash: that of the base served here.
    """
    with path.open("rb") as file:
        header = _header(file, identity, base_hash)
        told = header.metadata
        delta: dict[Place, Pair] = {}
        for place, scale in _scales(told.get("scales", "")).items():
            halves = [header.entries.get(f"layers.{place[0]}.{place[1]}.{half}") for half in "AB"]
            k, d = shape.matrices()[place[1]]
            a, b = halves
            if a is None or b is None or not 0 <= place[0] < shape.layers:
                raise BadFile(f"layer {place[0]} {place[1]} is not whole, or not in the base")
            if len(a.shape) != 2 or a.shape[1] != k or b.shape != (d, a.shape[0]):
                raise BadFile(f"layer {place[0]} {place[1]} has shapes {a.shape} and {b.shape}, not of this base")
            delta[place] = Pair(read_tensor(file, a), read_tensor(file, b), scale)
        if len(header.entries) != 2 * len(delta):
            raise BadFile("it has tensors without a scale")
    found = content_id(delta, base_hash)
    if found != identity:
        raise BadFile(f"its values have the content id {found}; {identity} is needed")
    return delta


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
