"""Adapters in PEFT's format for tests: a tiny base's shape, its config, its tensors, and the files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from streams.adapters.canonical import read_canonical
from streams.adapters.content import content_id
from streams.adapters.delta import Pair, Place
from streams.adapters.shape import MATRICES, ModelShape

TINY = ModelShape(layers=3, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=64, context=128)
BASE_HASH = "b" * 64
Tensors = dict[str, npt.NDArray[Any]]


def config(**changes: Any) -> dict[str, Any]:
    """A neutral adapter_config.json of rank 4, alpha 8, all seven matrices."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [f"{matrix}_proj" for matrix in MATRICES],
        "bias": "none",
        "lora_dropout": 0.05,
        **changes,
    }


def tensors(rank: int = 4, seed: int = 0, layers: tuple[int, ...] = (0, 1, 2), dtype: Any = np.float32) -> Tensors:
    """Random A and B for every matrix of the layers, in PEFT's names."""
    random = np.random.default_rng(seed)
    found: Tensors = {}
    for layer in layers:
        for matrix, (k, d) in TINY.matrices().items():
            block = "self_attn" if matrix in ("q", "k", "v", "o") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{matrix}_proj"
            found[f"{name}.lora_A.weight"] = random.normal(0, 0.1, (rank, k)).astype(dtype)
            found[f"{name}.lora_B.weight"] = random.normal(0, 0.1, (d, rank)).astype(dtype)
    return found


def write(folder: Path, weights: Tensors | bytes, told: dict[str, Any] | bytes) -> tuple[Path, str]:
    """Writes both files. Returns the weights' path and sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    data = weights if isinstance(weights, bytes) else save(weights)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(data)
    raw = told if isinstance(told, bytes) else json.dumps(told).encode()
    (folder / "adapter_config.json").write_bytes(raw)
    return path, hashlib.sha256(data).hexdigest()


def header(data: bytes) -> dict[str, Any]:
    """The JSON header of safetensors bytes."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + length])
    return found


def with_header(data: bytes, changed: dict[str, Any]) -> bytes:
    """The same data behind another header."""
    length = int.from_bytes(data[:8], "little")
    raw = json.dumps(changed).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def read_back(path: Path, identity: str, base_hash: str, checksum: str = "") -> dict[Place, Pair]:
    """The canonical file's values in float32, once it is read to its end. `checksum`: of what it is by default."""
    checksum = checksum or hashlib.sha256(path.read_bytes()).hexdigest()
    found = {
        place: Pair(_widened(stored.a.copy()), _widened(stored.b.copy()), stored.scale)
        for place, stored in read_canonical(path, identity, checksum, base_hash, TINY)
    }
    assert content_id(found, base_hash) == identity
    return found


def _widened(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
