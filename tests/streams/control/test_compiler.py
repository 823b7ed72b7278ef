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

from streams.adapters.locations import parse_location
from streams.adapters.refusals import Refusals
from streams.adapters.sources import Sources
from streams.adapters.store import S3Settings, Unavailable, open_store
from streams.control.compiler import Base, Compiler
from tests.streams.adapters.files import BASE_HASH, TINY, config, read_back, tensors, write
from tests.streams.control.bad_adapters import COMMANDS, FILES, HONEST, MODULES, Place, answers

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


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
    delta = read_back(stored, found.content_id, BASE_HASH)
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


@pytest.mark.parametrize(("field", "changes", "says"), COMMANDS)
def test_a_command_that_lies(place: Place, field: str, changes: dict[str, Any], says: str) -> None:
    found = place.refused(place.command(**changes))
    assert set(found) == {field}
    assert says in found[field]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_wrong(place: Place, name: str) -> None:
    weights, told, field, says = FILES[name]
    path, checksum = write(place.inbox / "bad", weights, told)
    found = place.refused(place.command(weights_uri=f"file://{path}", checksum=checksum))
    assert says in found[field]
    if not field.startswith("tensors") and name not in ("rank pattern above the limit",):
        assert set(found) == {field}


def test_each_bad_adapter_is_told_why(tmp_path: Path) -> None:
    told = answers(tmp_path)
    assert len(told) > 90
    assert all(reasons for _, reasons in told)


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
