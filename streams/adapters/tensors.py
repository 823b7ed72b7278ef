"""A safetensors file's header, read with limits, and the adapter's tensors out of it. No pickle, no archive, no mmap.

The file may be hostile: nothing is allocated by a number in it before that number was checked against the file's size.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from streams.adapters.delta import Array, Delta, Pair, Place, is_zero, ordered
from streams.adapters.manifest import Manifest
from streams.adapters.refusals import Refusals, clip
from streams.adapters.shape import ModelShape

HEADER_BYTES_LIMIT = 8 * 1024 * 1024
_TENSORS_LIMIT = 100_000
_WIDTH = {"F32": 4, "F16": 2, "BF16": 2}
_MATRIX = {
    **{f"self_attn.{matrix}_proj": matrix for matrix in ("q", "k", "v", "o")},
    **{f"mlp.{matrix}_proj": matrix for matrix in ("gate", "up", "down")},
}
_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<module>self_attn\.[qkvo]_proj"
    r"|mlp\.(?:gate|up|down)_proj)\.lora_(?P<half>[AB])\.weight"
)


class BadFile(ValueError):
    """The file is no safetensors file that may be read; the message says where and why."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor: its bytes are file[start:end]."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(msgspec.Struct, frozen=True):
    """`raw`: the bytes that it was read from, the file's first."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes


def read_header(file: BinaryIO) -> Header:
    """The header of an open file. Every byte behind it belongs to exactly one tensor. Raises BadFile."""
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > size - 8:
        raise BadFile(f"truncated: the header of {length} bytes does not fit in {size} bytes")
    if length > HEADER_BYTES_LIMIT:
        raise BadFile(f"the header has {length} bytes; at most {HEADER_BYTES_LIMIT} are accepted")
    text = file.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"the header is no JSON: {clip(str(error))}") from None
    if not isinstance(raw, dict):
        raise BadFile("the header is no JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadFile("__metadata__ is no object of texts")
    if len(raw) > _TENSORS_LIMIT:
        raise BadFile(f"{len(raw)} tensors; at most {_TENSORS_LIMIT} are accepted")
    entries = {name: _entry(name, value, 8 + length) for name, value in raw.items()}
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            what = (
                "overlaps the one before it" if entry.start < at else "leaves bytes before it that belong to no tensor"
            )
            raise BadFile(f"tensor {clip(name)} {what}")
        at = entry.end
    if at != size:
        what = "truncated" if at > size else "bytes behind the last tensor"
        raise BadFile(f"{what}: the tensors end at byte {at}, the file at {size}")
    return Header(entries, metadata, prefix + text)


def read_tensor(file: BinaryIO, entry: Entry) -> Array:
    """The tensor as float32, exactly (BF16 and F16 are subsets of it). Raises BadFile when the file has shrunk."""
    file.seek(entry.start)
    data = file.read(entry.end - entry.start)
    if len(data) != entry.end - entry.start:
        raise BadFile("truncated while it was read")
    if entry.dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, "<f4" if entry.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(entry.shape)


def load_delta(path: Path, manifest: Manifest | None, shape: ModelShape, refusals: Refusals) -> Delta | None:
    """The adapter in a PEFT file, checked against its manifest; None if anything was added to `refusals`.

    Every reason is told at once, of values and of names alike. No manifest: whatever can be said without one.

    Every tensor is used exactly once and every one that the manifest promises is there, with its shape; all numbers
    are finite, and something is different from the base.
    """
    with path.open("rb") as file:
        try:
            header = read_header(file)
            places = None if manifest is None else _placed(header, manifest, shape, refusals)
            read = ((name, read_tensor(file, entry)) for name, entry in header.entries.items())
            if places is None:
                for name, values in read:
                    _finite(name, values, refusals)
                return None
            halves = dict(read)
        except BadFile as error:
            refusals.add("weights_uri", f"no safetensors file: {error}")
            return None
    finite = [_finite(name, values, refusals) for name, values in halves.items()]
    if manifest is None or not all(finite):
        return None
    delta = {place: Pair(halves[a], halves[b], manifest.scales[place]) for place, (a, b) in places.items()}
    if all(is_zero(pair) for pair in delta.values()):
        refusals.add("tensors", "all of A B is zero: the adapter was never trained and would answer as the base does")
        return None
    return delta


def _finite(name: str, values: Array, refusals: Refusals) -> bool:
    if np.isfinite(values).all():
        return True
    refusals.add(f"tensors.{name}", "has a number that is not finite")
    return False


def _placed(
    header: Header, manifest: Manifest, shape: ModelShape, refusals: Refusals
) -> dict[Place, tuple[str, str]] | None:
    """Place -> the names of its A and B."""
    own = Refusals()
    sizes = shape.matrices()
    names: dict[tuple[Place, str], str] = {}
    for name, entry in header.entries.items():
        found = _NAME.fullmatch(name)
        if found is None:
            own.add(f"tensors.{name}", "no LoRA tensor of an attention or MLP matrix in PEFT's naming")
            continue
        place, half = (int(found["layer"]), _MATRIX[found["module"]]), found["half"]
        if place not in manifest.ranks:
            own.add(f"tensors.{name}", "adapter_config.json does not adapt this matrix")
            continue
        rank, (k, d) = manifest.ranks[place], sizes[place[1]]
        expected = (rank, k) if half == "A" else (d, rank)
        if entry.shape != expected:
            own.add(f"tensors.{name}", f"has shape {list(entry.shape)}; {list(expected)} is needed")
        names[place, half] = name
    for place in ordered(manifest.ranks):
        for half in "AB":
            if (place, half) not in names:
                own.add(f"tensors.layers.{place[0]}.{place[1]}_proj.lora_{half}", "is promised and missing")
    refusals.take(own)
    return None if own else {place: (names[place, "A"], names[place, "B"]) for place in ordered(manifest.ranks)}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(name: str, value: Any, data_start: int) -> Entry:
    def bad(what: str) -> BadFile:
        return BadFile(f"tensor {clip(name)}: {what}")

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise bad("needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTH:
        raise bad(f"has dtype {clip(str(dtype))}; F32, F16 and BF16 are accepted")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise bad("has a shape that is no list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and 0 <= n < 2**60 for n in offsets)
    ):
        raise bad("has data_offsets that are no pair of positions")
    start, end = offsets
    if end - start != math.prod(shape) * _WIDTH[dtype]:
        raise bad(f"has {end - start} bytes for shape {shape} of {dtype}")
    return Entry(dtype, tuple(shape), data_start + start, data_start + end)
