"""A safetensors file as an enemy would write it, and the checks of an honest one."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from streams.adapters.delta import Delta
from streams.adapters.manifest import compile_manifest
from streams.adapters.refusals import Refusals
from streams.adapters.tensors import HEADER_BYTES_LIMIT, BadFile, load_delta, read_header
from tests.streams.adapters.files import TINY, Tensors, config, header, tensors, with_header, write

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def loaded(folder: Path, weights: Tensors | bytes, **changes: Any) -> tuple[Delta | None, dict[str, str]]:
    path, _ = write(folder, weights, config(**changes))
    refusals = Refusals()
    manifest = compile_manifest((folder / "adapter_config.json").read_bytes(), TINY, refusals)
    assert manifest is not None
    delta = load_delta(path, manifest, TINY, refusals)
    return delta, {reason.field: reason.message for reason in refusals.found}


def test_an_honest_file(tmp_path: Path) -> None:
    weights = tensors()
    delta, refused = loaded(tmp_path, weights)
    assert not refused
    assert delta is not None
    assert len(delta) == 21
    np.testing.assert_array_equal(delta[0, "q"].a, weights[f"{Q0}.lora_A.weight"])
    np.testing.assert_array_equal(delta[0, "q"].b, weights[f"{Q0}.lora_B.weight"])
    assert delta[0, "q"].scale == 2.0


def test_half_precision_is_read_exactly(tmp_path: Path) -> None:
    weights = tensors(dtype=np.float16)
    delta, refused = loaded(tmp_path, weights)
    assert not refused
    assert delta is not None
    np.testing.assert_array_equal(
        delta[2, "down"].b, weights["base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"]
    )


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    rounded = {name: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, v in tensors().items()}
    as_words = save({name: (v.view(np.uint32) >> 16).astype(np.uint16) for name, v in rounded.items()})
    told = header(as_words)
    for entry in told.values():
        entry["dtype"] = "BF16"
    delta, refused = loaded(tmp_path, with_header(as_words, told))
    assert not refused
    assert delta is not None
    np.testing.assert_array_equal(delta[0, "q"].a, rounded[f"{Q0}.lora_A.weight"])


def _without(name: str) -> Tensors:
    return {key: value for key, value in tensors().items() if key != name}


def _with(name: str, value: Any) -> Tensors:
    return {**tensors(), name: value}


def _spoilt(number: float) -> Tensors:
    weights = tensors()
    weights[f"{Q0}.lora_A.weight"][1, 2] = number
    return weights


@pytest.mark.parametrize(
    ("weights", "field", "says"),
    [
        (_without(f"{Q0}.lora_B.weight"), "tensors.layers.0.q_proj.lora_B", "missing"),
        (_with("lm_head.weight", np.ones((2, 2), np.float32)), "tensors.lm_head.weight", "no LoRA tensor"),
        (_with("x.lora_magnitude_vector", np.ones(3, np.float32)), "tensors.x.lora_magnitude_vector", "no LoRA"),
        (_with(f"{Q0}.lora_A.weight", np.ones((5, 32), np.float32)), f"tensors.{Q0}.lora_A.weight", "[4, 32]"),
        (_with(f"{Q0}.lora_A.weight", np.ones((32, 4), np.float32)), f"tensors.{Q0}.lora_A.weight", "[4, 32]"),
        (_with(f"{Q0}.lora_B.weight", np.ones((16, 4), np.float32)), f"tensors.{Q0}.lora_B.weight", "[32, 4]"),
        (_with(f"{Q0}.lora_A.weight", np.ones((4, 32), np.float64)), "weights_uri", "F64"),
        (_with(f"{Q0}.lora_A.weight", np.ones((4, 32), np.int32)), "weights_uri", "I32"),
        (_with(Q0.replace(".0.", ".3.") + ".lora_A.weight", np.ones((4, 32), np.float32)), None, "does not adapt"),
        (_with(Q0.replace(".0.", ".00.") + ".lora_A.weight", np.ones((4, 32), np.float32)), None, "no LoRA tensor"),
        (_spoilt(float("nan")), f"tensors.{Q0}.lora_A.weight", "finite"),
        (_spoilt(float("inf")), f"tensors.{Q0}.lora_A.weight", "finite"),
        ({n: v * ("lora_A" in n) for n, v in tensors().items()}, "tensors", "zero"),
        ({n: v * ("lora_B" in n) for n, v in tensors().items()}, "tensors", "zero"),
        ({}, "tensors.layers.0.q_proj.lora_A", "missing"),
    ],
)  # fmt: skip
def test_refused_tensors(tmp_path: Path, weights: Tensors, field: str | None, says: str) -> None:
    delta, refused = loaded(tmp_path, weights)
    assert delta is None
    if field is None:
        assert any(says in message for message in refused.values())
    else:
        assert says in refused[field]


def test_renamed_tensors_are_refused_on_both_sides(tmp_path: Path) -> None:
    weights = {name.replace("base_model.model.", ""): value for name, value in tensors().items()}
    delta, refused = loaded(tmp_path, weights)
    assert delta is None
    assert any("no LoRA tensor" in message for message in refused.values())
    assert "refusals" in refused  # bounded: 42 strangers and 42 missing ones


def test_a_layer_that_the_config_does_not_adapt(tmp_path: Path) -> None:
    _, refused = loaded(tmp_path, tensors(), layers_to_transform=[0, 1])
    assert all(".layers.2." in field for field in refused)
    assert len(refused) == 14


def test_one_half_zero_component_is_no_delta(tmp_path: Path) -> None:
    weights = {name: np.zeros_like(value) for name, value in tensors().items()}
    weights[f"{Q0}.lora_A.weight"][0] = 1
    weights[f"{Q0}.lora_B.weight"][:, 1] = 1
    assert loaded(tmp_path / "apart", weights)[0] is None
    weights[f"{Q0}.lora_B.weight"][:, 0] = 1
    assert loaded(tmp_path / "together", weights)[0] is not None


GOOD = save({"a": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)})


def _changed(name: str, **fields: Any) -> bytes:
    told = header(GOOD)
    told[name] = {**told[name], **fields}
    return with_header(GOOD, told)


ENEMIES: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "truncated in the data": GOOD[:-1],
    "truncated in the header": GOOD[:20],
    "bytes behind": GOOD + b"x",
    "length of the header far beyond the file": (2**63).to_bytes(8, "little") + b"{}",
    "a header above the limit": (HEADER_BYTES_LIMIT + 1).to_bytes(8, "little") + b" " * (HEADER_BYTES_LIMIT + 1),
    "no json": (4).to_bytes(8, "little") + b"{{{{",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "no utf-8": (4).to_bytes(8, "little") + b'{"\xff"',
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00cposix\nsystem\n",
    "a zip": b"PK\x03\x04" + b"\x00" * 60,
    "a name twice": (lambda raw: len(raw).to_bytes(8, "little") + raw + b"\0" * 4)(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    ),
    "overlap": _changed("b", data_offsets=[12, 20]),
    "the same bytes twice": _changed("b", data_offsets=[0, 8]),
    "a hole": _changed("b", data_offsets=[20, 28]) + b"\0" * 4,
    "beyond the end": _changed("b", data_offsets=[16, 2**40]),
    "backwards": _changed("b", data_offsets=[24, 16]),
    "negative": _changed("a", data_offsets=[-16, 0]),
    "floats as offsets": _changed("a", data_offsets=[0.0, 16.0]),
    "true as offset": _changed("a", data_offsets=[False, 16]),
    "shape too large for the bytes": _changed("a", shape=[2, 3]),
    "shape of huge numbers": _changed("a", shape=[2**62, 2**62]),
    "negative shape": _changed("a", shape=[-2, -2]),
    "shape no list": _changed("a", shape="22"),
    "dtype unknown": _changed("a", dtype="F8_E5M2"),
    "dtype no text": _changed("a", dtype=["F32"]),
    "a field too many": _changed("a", extra=1),
    "entry no object": with_header(GOOD, {**header(GOOD), "b": 5}),
    "metadata no object": with_header(GOOD, {**header(GOOD), "__metadata__": 5}),
    "metadata no texts": with_header(GOOD, {**header(GOOD), "__metadata__": {"a": 1}}),
    "huge integer": with_header(GOOD, {**header(GOOD), "b": {"dtype": "F32", "shape": [10**400], "data_offsets": [1]}}),
}  # fmt: skip


def test_the_good_one_reads() -> None:
    assert set(read_header(io.BytesIO(GOOD)).entries) == {"a", "b"}


@pytest.mark.parametrize("name", ENEMIES)
def test_hostile_headers(name: str) -> None:
    with pytest.raises(BadFile) as refused:
        read_header(io.BytesIO(ENEMIES[name]))
    assert 0 < len(str(refused.value)) < 1_000


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = read_header(io.BytesIO(data))
    except BadFile:
        return
    assert sum(entry.end - entry.start for entry in found.entries.values()) <= len(data)


@given(st.integers(8, len(GOOD) - 1), st.integers(0, 255))
def test_any_byte_changed_is_read_or_refused(at: int, byte: int) -> None:
    data = bytearray(GOOD)
    data[at] = byte
    try:
        read_header(io.BytesIO(bytes(data)))
    except BadFile:
        return
