"""The base hash: the same for the same model however it is stored, another one for any byte, kept and never stale."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from streams.adapters import base_model
from streams.adapters.base_model import BadModel, base_hash, compute_base_hash

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "rope_theta": 1e5, "rope_scaling": None}


def tensors() -> dict[str, Any]:
    noise = np.random.default_rng(7)
    return {f"model.layers.{layer}.w": noise.standard_normal((8, 4)).astype(np.float32) for layer in range(4)}


def write(folder: Path, config: dict[str, Any], *shards: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{number}-of-{len(shards)}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole", CONFIG, tensors())


def test_the_same_for_shards_and_fields_that_change_nothing(tmp_path: Path, whole: Path) -> None:
    items = sorted(tensors().items())
    config = {"transformers_version": "5", **dict(reversed(CONFIG.items())), "use_cache": True}
    del config["rope_scaling"]
    sharded = write(tmp_path / "sharded", config, dict(items[2:]), dict(items[:2]))
    assert base_hash(sharded) == base_hash(whole)


@pytest.mark.parametrize("position", [-1, -70])
def test_another_for_any_byte_of_a_tensor(whole: Path, position: int) -> None:
    before = base_hash(whole)
    path = whole / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert base_hash(whole) != before


def test_another_for_config_name_shape_and_dtype(tmp_path: Path, whole: Path) -> None:
    def renamed(name: str) -> str:
        return "x" + name

    variants = [
        write(tmp_path / "config", {**CONFIG, "rope_theta": 1e4}, tensors()),
        write(tmp_path / "names", CONFIG, {renamed(name): values for name, values in tensors().items()}),
        write(tmp_path / "shapes", CONFIG, {name: values.reshape(4, 8) for name, values in tensors().items()}),
        write(tmp_path / "dtypes", CONFIG, {name: values.astype(np.float16) for name, values in tensors().items()}),
    ]
    assert len({compute_base_hash(folder) for folder in [whole, *variants]}) == 5


def test_kept_until_a_file_changes(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = base_hash(whole)
    assert json.loads((whole / "base_hash.json").read_text())["base_hash"] == first
    computed: list[Path] = []

    def compute(folder: Path) -> str:
        computed.append(folder)
        return first

    monkeypatch.setattr(base_model, "compute_base_hash", compute)
    assert base_hash(whole) == first
    assert not computed
    os.utime(whole / "model.safetensors", ns=(1, 1))
    assert base_hash(whole) == first
    assert computed == [whole]


def test_damaged_note_is_computed_again(whole: Path) -> None:
    first = base_hash(whole)
    (whole / "base_hash.json").write_text('{"base_hash": 3')
    assert base_hash(whole) == first


def test_kept_in_the_cache_when_the_folder_cannot_be_written(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFLEET_CACHE", str(tmp_path / "cache"))
    (whole / "base_hash.json").mkdir()  # nothing can be renamed onto it, not even by root
    first = base_hash(whole)
    assert len(list((tmp_path / "cache" / "base-hashes").iterdir())) == 1
    monkeypatch.setattr(base_model, "compute_base_hash", lambda folder: "computed again")
    assert base_hash(whole) == first


def test_says_what_is_wrong(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(BadModel, match=r"has neither model\.safetensors nor"):
        base_hash(tmp_path)
    (whole / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(BadModel, match=r"has both model\.safetensors and"):
        base_hash(whole)
    (whole / "model.safetensors").rename(whole / "model-1-of-1.safetensors")
    (whole / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(BadModel, match="is not the name of a file beside it"):
        base_hash(whole)
    (whole / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(BadModel, match=r"gone\.safetensors: No such file"):
        base_hash(whole)
    (whole / "model.safetensors.index.json").unlink()
    (whole / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(BadModel, match="does not fit"):
        base_hash(whole)
