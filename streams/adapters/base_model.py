"""The base hash: what the served base model is, wherever it lies and however its file is cut into shards.

sha256 over the config's fields that change a logit and every tensor's name, dtype, shape and bytes. It takes a second
per GB, so it is kept in base_hash.json beside the model (where that cannot be written: in the user's cache) with the
size and time of every file it was computed from; a file that differs from that makes it be computed again.
No torch: safetensors files are read by their header and bytes. A crash leaves no half-written file.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from streams.adapters.tensors import BadFile, Entry, read_header
from streams.adapters.user_cache import cache_folder

CONFIG, SINGLE, INDEX, KEPT = "config.json", "model.safetensors", "model.safetensors.index.json", "base_hash.json"
_DOMAIN = b"lorafleet base 1\n"
_CHUNK_BYTES = 1 << 20
# Fields of config.json that say where a model comes from or how to run it, not what it computes.
_IDLE_FIELDS = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"}
)


class BadModel(ValueError):
    """The folder is no model that can be served; the message says what is missing or wrong."""


class KeptHash(msgspec.Struct, frozen=True):
    """What base_hash.json holds. files: name -> (size in bytes, modification time in ns)."""

    base_hash: str
    files: dict[str, tuple[int, int]]


def base_hash(folder: Path) -> str:
    """64 hex digits for the Hugging Face folder `folder`. Blocks while it is computed. Raises BadModel."""
    indexed = [INDEX] if (folder / INDEX).exists() else []
    files = {name: _stamp(folder / name) for name in (CONFIG, *indexed, *weight_files(folder))}
    elsewhere = cache_folder() / "base-hashes" / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()}.json"
    for kept in (folder / KEPT, elsewhere):
        found = _read(kept)
        if found and found.files == files:
            return found.base_hash
    value = KeptHash(compute_base_hash(folder), files)
    try:
        _write(folder / KEPT, value)
    except OSError:
        _write(elsewhere, value)
    return value.base_hash


def compute_base_hash(folder: Path) -> str:
    """The hash itself, from every byte. Raises BadModel."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise BadModel(f"{folder / CONFIG}: {error}") from None
    digest = hashlib.sha256(_DOMAIN)
    digest.update(_canonical(config))
    tensors: dict[str, tuple[Path, Entry]] = {}
    for name in weight_files(folder):
        path = folder / name
        try:
            with path.open("rb") as file:
                entries = read_header(file).entries
        except (OSError, BadFile) as error:
            raise BadModel(f"{path}: {error}") from None
        if twice := tensors.keys() & entries.keys():
            raise BadModel(f"{path}: tensor {min(twice)} is in another file as well")
        tensors |= {tensor: (path, entry) for tensor, entry in entries.items()}
    for tensor in sorted(tensors):
        path, entry = tensors[tensor]
        digest.update(f"{json.dumps(tensor)} {entry.dtype} {list(entry.shape)}\n".encode())
        for chunk in _bytes_of(path, entry):
            digest.update(chunk)
    return digest.hexdigest()


def _canonical(config: dict[str, Any]) -> bytes:
    """Absent and null are the same to every reader of config.json."""
    fields = {name: value for name, value in config.items() if value is not None and name not in _IDLE_FIELDS}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def weight_files(folder: Path) -> list[str]:
    """The safetensors files that make up the model, by name: one, or those that the index names. Raises BadModel."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise BadModel(f"{folder} has neither {SINGLE} nor {INDEX}: name a Hugging Face folder with safetensors")
        return [SINGLE]
    if (folder / SINGLE).exists():
        raise BadModel(f"{folder} has both {SINGLE} and {INDEX}, and readers differ in which counts: take one away")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadModel(f"{index}: {error!r}") from None
    if strange := [name for name in names if Path(str(name)).name != name]:
        raise BadModel(f"{index}: {strange[0]!r} is not the name of a file beside it")
    return sorted(names)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise BadModel(f"{path}: {error.strerror}") from None
    return found.st_size, found.st_mtime_ns


def _bytes_of(path: Path, entry: Entry) -> Iterator[bytes]:
    left = entry.end - entry.start
    with path.open("rb") as file:
        file.seek(entry.start)
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise BadModel(f"{path}: shrank while it was read")
            left -= len(chunk)
            yield chunk


def _read(path: Path) -> KeptHash | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptHash)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, value: KeptHash) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
    temporary.replace(path)
