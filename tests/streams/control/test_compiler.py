"""Every reason against a registration, each named after its field, and all of them at once."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from schemas.adapters import RegisterAdapter
from streams.adapters.canonical import read_canonical
from streams.adapters.locations import parse_location
from streams.adapters.refusals import Refusals
from streams.adapters.sources import Sources
from streams.adapters.store import S3Settings, Unavailable, open_store
from streams.control.compiler import Base, Compiler
from streams.control.registry import Compiled
from tests.streams.adapters.files import BASE_HASH, TINY, config, header, tensors, with_header, write

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Place:
    """A compiler whose sources are the folder `in`, and an honest adapter of acme in it."""

    def __init__(self, folder: Path) -> None:
        self.inbox, self.store, self.scratch = folder / "in", folder / "store", folder / "scratch"
        for one in (self.inbox, self.store, self.scratch):
            one.mkdir()
        settings = S3Settings()
        self.compiler = Compiler(
            Base(BASE_HASH, TINY),
            8,
            Sources(f"file://{self.inbox}", settings),
            open_store(parse_location(f"file://{self.store}"), settings),
        )
        self.path, self.checksum = write(self.inbox / "acme", tensors(), config())

    def command(self, **changes: Any) -> RegisterAdapter:
        honest = RegisterAdapter(
            "c", "acme/support@7", 7, BASE_HASH, 4, 8.0, MODULES, f"file://{self.path}", self.checksum
        )
        return msgspec.structs.replace(honest, **changes)

    def compile(self, command: RegisterAdapter) -> Compiled:
        found = self.compiler.compile(command, self.scratch)
        assert isinstance(found, Compiled), found.found
        return found

    def refused(self, command: RegisterAdapter) -> dict[str, str]:
        found = self.compiler.compile(command, self.scratch)
        assert isinstance(found, Refusals)
        assert not list(self.store.iterdir())
        told: dict[str, str] = {}
        for reason in found.found:
            told[reason.field] = f"{told.get(reason.field, '')} {reason.message}"
        return told


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_honest_adapter_becomes_one_canonical_file(place: Place) -> None:
    found = place.compile(place.command())
    assert (found.rank, found.alpha, found.target_modules) == (4, 8.0, MODULES)
    place.compiler.upload(found, place.scratch)
    stored = place.store / "acme" / "support" / "7" / f"{found.content_id}.safetensors"
    assert found.weights_uri == f"file://{stored}"
    assert stored.stat().st_size == found.size_bytes
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == found.checksum
    delta = read_canonical(stored, found.content_id, BASE_HASH, TINY)
    weights = tensors()
    name = "base_model.model.model.layers.1.mlp.up_proj"
    np.testing.assert_array_equal(delta[1, "up"].a, weights[f"{name}.lora_A.weight"])
    assert delta[1, "up"].scale == 2.0


def test_what_does_not_change_the_result_does_not_change_the_id(place: Place, tmp_path: Path) -> None:
    first = place.compile(place.command())
    reordered = dict(reversed(tensors().items()))
    data = save(reordered, metadata={"format": "pt", "trained": "yesterday"})
    path, checksum = write(place.inbox / "again", data, config(lora_dropout=0.3, peft_version="0.99", revision="main"))
    place.scratch = tmp_path / "second"
    place.scratch.mkdir()
    second = place.compile(place.command(weights_uri=f"file://{path}", checksum=checksum, adapter_id="globex/x@7"))
    assert second.content_id == first.content_id
    assert second.checksum == first.checksum
    assert second.weights_uri != first.weights_uri


COMMANDS: list[tuple[str, dict[str, Any], str]] = [
    ("adapter_id", {"adapter_id": "acme/support"}, "customer/name@version"),
    ("adapter_id", {"adapter_id": "../support@7"}, "customer/name@version"),
    ("version", {"version": 6}, "says 7"),
    ("base_model_hash", {"base_model_hash": "c" * 64}, BASE_HASH),
    ("base_model_hash", {"base_model_hash": ""}, BASE_HASH),
    ("rank", {"rank": 8}, "r = 4"),
    ("rank", {"rank": 0}, "1 to 8"),
    ("rank", {"rank": 16}, "1 to 8"),
    ("alpha", {"alpha": 16.0}, "lora_alpha = 8"),
    ("target_modules", {"target_modules": ["q_proj"]}, "k_proj"),
    ("target_modules", {"target_modules": []}, "empty"),
    ("target_modules", {"target_modules": [*MODULES, "lm_head"]}, "lm_head"),
    ("checksum", {"checksum": "0" * 64}, "sha256 is"),
    ("checksum", {"checksum": "abc"}, "64 lower-case hex"),
    ("checksum", {"checksum": "A" * 64}, "64 lower-case hex"),
    ("weights_uri", {"weights_uri": "file:///etc/passwd"}, ".safetensors"),
    ("weights_uri", {"weights_uri": "file:///etc/x.safetensors"}, "not below"),
    ("weights_uri", {"weights_uri": "s3://another-bucket/x.safetensors"}, "not below"),
    ("weights_uri", {"weights_uri": "https://example.org/x.safetensors"}, "s3://bucket/key"),
    ("weights_uri", {"weights_uri": "http://169.254.169.254/latest/meta-data"}, "s3://bucket/key"),
    ("weights_uri", {"weights_uri": ""}, "s3://bucket/key"),
]


@pytest.mark.parametrize(("field", "changes", "says"), COMMANDS)
def test_a_command_that_lies(place: Place, field: str, changes: dict[str, Any], says: str) -> None:
    found = place.refused(place.command(**changes))
    assert set(found) == {field}
    assert says in found[field]


def _with_header_of(data: bytes, name: str, **fields: Any) -> bytes:
    told = header(data)
    told[name] = {**told[name], **fields}
    return with_header(data, told)


HONEST = save(tensors())
Q0A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0B = Q0A.replace("lora_A", "lora_B")
FILES: dict[str, tuple[bytes, dict[str, Any] | bytes, str, str]] = {
    "truncated": (HONEST[:-100], config(), "weights_uri", "truncated"),
    "empty": (b"", config(), "weights_uri", "truncated"),
    "pickle": (b"\x80\x04cposix\nsystem\n", config(), "weights_uri", "no safetensors"),
    "zip": (b"PK\x03\x04" + b"\0" * 100, config(), "weights_uri", "no safetensors"),
    "huge header": ((1 << 40).to_bytes(8, "little") + b"{}", config(), "weights_uri", "header"),
    "overlap": (_with_header_of(HONEST, Q0B, data_offsets=[0, 512]), config(), "weights_uri", "tensor"),
    "too large": (b"\0" * (9 << 20), config(), "weights_uri", "at most"),
    "nan": (save({**tensors(), Q0A: np.full((4, 32), np.nan, np.float32)}), config(), f"tensors.{Q0A}", "finite"),
    "untrained": (save({n: v * ("lora_A" in n) for n, v in tensors().items()}), config(), "tensors", "zero"),
    "wrong shape": (save({**tensors(), Q0A: np.ones((4, 33), np.float32)}), config(), f"tensors.{Q0A}", "[4, 32]"),
    "other rank in the file": (save(tensors(rank=2)), config(), f"tensors.{Q0A}", "[4, 32]"),
    "float64": (save({**tensors(), Q0A: np.ones((4, 32))}), config(), "weights_uri", "F64"),
    "missing layer": (save(tensors(layers=(0, 1))), config(), "tensors.layers.2.q_proj.lora_A", "missing"),
    "extra tensor": (save({**tensors(), "lm_head": np.ones(3, np.float32)}), config(), "tensors.lm_head", "no LoRA"),
    "dora": (HONEST, config(use_dora=True), "adapter_config.use_dora", "DoRA"),
    "bias": (HONEST, config(bias="lora_only"), "adapter_config.bias", "none"),
    "saved modules": (HONEST, config(modules_to_save=["lm_head"]), "adapter_config.modules_to_save", "not served"),
    "unknown field": (HONEST, config(new_trick=7), "adapter_config.new_trick", "unknown"),
    "rank pattern above the limit": (HONEST, config(rank_pattern={"q_proj": 64}), "rank", "64"),
    "config no json": (HONEST, b"{", "adapter_config", "JSON"),
    "config too large": (HONEST, b" " * 300_000, "adapter_config", "at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_wrong(place: Place, name: str) -> None:
    weights, told, field, says = FILES[name]
    path, checksum = write(place.inbox / "bad", weights, told)
    found = place.refused(place.command(weights_uri=f"file://{path}", checksum=checksum))
    assert says in found[field]
    if not field.startswith("tensors") and name not in ("rank pattern above the limit",):
        assert set(found) == {field}


def test_a_bin_file(place: Place) -> None:
    path = place.inbox / "acme" / "adapter_model.bin"
    path.write_bytes(HONEST)
    assert "pickles" in place.refused(place.command(weights_uri=f"file://{path}"))["weights_uri"]


def test_nothing_there(place: Place) -> None:
    gone = place.command(weights_uri=f"file://{place.inbox}/gone/adapter_model.safetensors")
    assert set(place.refused(gone)) == {"weights_uri", "adapter_config"}


def test_a_missing_config_does_not_hide_a_broken_file(place: Place) -> None:
    (place.inbox / "acme" / "adapter_config.json").unlink()
    place.path.write_bytes(HONEST[:50])
    found = place.refused(place.command())
    assert set(found) == {"weights_uri", "adapter_config", "checksum"}


def test_links_lead_nowhere(place: Place, tmp_path: Path) -> None:
    outside, checksum = write(tmp_path / "outside", tensors(), config())
    (place.inbox / "link").symlink_to(outside.parent)
    linked = place.inbox / "files"
    linked.mkdir()
    (linked / "a.safetensors").symlink_to(outside)
    (linked / "adapter_config.json").symlink_to(outside.parent / "adapter_config.json")
    for uri in (f"{place.inbox}/link/adapter_model.safetensors", f"{linked}/a.safetensors"):
        found = place.refused(place.command(weights_uri=f"file://{uri}", checksum=checksum))
        assert "link" in found["weights_uri"]
    dotted = place.refused(place.command(weights_uri=f"file://{place.inbox}/../outside/adapter_model.safetensors"))
    assert set(dotted) == {"weights_uri"}


def test_a_customer_does_not_register_out_of_anothers_folder(place: Place) -> None:
    settings = S3Settings()
    store = open_store(parse_location(f"file://{place.store}"), settings)
    sources = Sources(f"file://{place.inbox}/{{customer}}", settings)
    place.compiler = Compiler(Base(BASE_HASH, TINY), 8, sources, store)
    assert "globex" in place.refused(place.command(adapter_id="globex/support@7"))["weights_uri"]
    place.compile(place.command())


def test_everything_at_once(place: Place) -> None:
    path, _ = write(place.inbox / "bad", HONEST[:-1], config(use_dora=True, bias="all", unheard_of=1))
    lies = place.command(
        version=8, base_model_hash="c" * 64, rank=99, weights_uri=f"file://{path}", checksum="0" * 64, target_modules=[]
    )
    assert set(place.refused(lies)) == {
        "version", "base_model_hash", "rank", "target_modules", "checksum", "weights_uri", "adapter_config.use_dora",
        "adapter_config.bias", "adapter_config.unheard_of",
    }  # fmt: skip


def test_one_fault_hides_no_other(place: Place) -> None:
    weights = tensors(rank=4)
    weights[Q0 + ".lora_A.weight"][0, 0] = np.nan
    weights["surprise"] = np.ones(1, np.float32)
    path, checksum = write(place.inbox / "bad", weights, config(use_dora=True, lora_alpha=9))
    told = place.refused(
        place.command(weights_uri=f"file://{path}", checksum=checksum, rank=5, target_modules=["q_proj"])
    )
    assert set(told) == {
        "adapter_config.use_dora", "rank", "alpha", "target_modules", "tensors.surprise", f"tensors.{Q0}.lora_A.weight"
    }  # fmt: skip


def test_missing_weights_do_not_hide_a_bad_config(place: Place) -> None:
    path, _ = write(place.inbox / "bad", HONEST, config(bias="all"))
    path.unlink()
    assert set(place.refused(place.command(weights_uri=f"file://{path}"))) == {"weights_uri", "adapter_config.bias"}


def test_a_store_that_is_away_is_no_refusal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object, **__: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("streams.adapters.file_store.os.open", stale)
    with pytest.raises(Unavailable):
        place.compiler.compile(place.command(), place.scratch)


def test_a_source_folder_that_is_not_there_is_named(place: Place, tmp_path: Path) -> None:
    place.inbox.rename(tmp_path / "elsewhere")
    told = place.refused(place.command())
    assert set(told) == {"weights_uri", "adapter_config"}
    assert f"file://{place.path}: there is no folder {place.inbox}" in told["weights_uri"]


def test_messages_stay_short_and_printable(place: Place) -> None:
    names = {f"\x1b[31m{'x' * 5_000}{i}": np.ones(1, np.float32) for i in range(300)}
    path, checksum = write(place.inbox / "bad", save(names), config())
    found = place.compiler.compile(place.command(weights_uri=f"file://{path}", checksum=checksum), place.scratch)
    assert isinstance(found, Refusals)
    told = json.dumps(msgspec.to_builtins(found.found))
    assert len(told) < 60_000
    assert "\\u001b" not in told
