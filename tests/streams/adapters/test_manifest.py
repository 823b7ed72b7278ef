"""adapter_config.json: neutral values pass, applied fields mean what PEFT means, all else is refused by name."""

import json
import math
from typing import Any

import pytest

from streams.adapters.manifest import Manifest, compile_manifest
from streams.adapters.refusals import Refusals
from tests.streams.adapters.files import TINY, config


def compiled(**changes: Any) -> Manifest:
    refusals = Refusals()
    manifest = compile_manifest(json.dumps(config(**changes)).encode(), TINY, refusals)
    assert manifest is not None, refusals.found
    return manifest


def refused(raw: dict[str, Any] | bytes) -> dict[str, str]:
    refusals = Refusals()
    data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    compile_manifest(data, TINY, refusals)
    assert refusals
    return {reason.field: reason.message for reason in refusals.found}


def test_a_plain_config() -> None:
    manifest = compiled()
    assert len(manifest.ranks) == 3 * 7
    assert set(manifest.ranks.values()) == {4}
    assert set(manifest.scales.values()) == {2.0}
    assert manifest.modules == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_rslora_divides_by_the_root() -> None:
    assert set(compiled(use_rslora=True).scales.values()) == {8 / math.sqrt(4)}


def test_layers_and_modules_are_chosen_as_told() -> None:
    manifest = compiled(target_modules=["q_proj", "mlp.down_proj"], layers_to_transform=[1, 2])
    assert set(manifest.ranks) == {(1, "q"), (2, "q"), (1, "down"), (2, "down")}
    assert manifest.modules == ["q_proj", "down_proj"]
    assert set(compiled(layers_to_transform=0).ranks) == {(0, m) for m in TINY.matrices()}
    assert set(compiled(target_modules=["model.layers.1.self_attn.q_proj"]).ranks) == {(1, "q")}
    assert set(compiled(exclude_modules=["mlp.up_proj"]).ranks) == set(compiled().ranks) - {(i, "up") for i in range(3)}


def test_expressions() -> None:
    assert set(compiled(target_modules="all-linear").ranks) == set(compiled().ranks)
    only = compiled(target_modules=r".*layers\.(0|2)\..*\.(q|v)_proj", exclude_modules=r".*2\.self_attn\.v_proj")
    assert set(only.ranks) == {(0, "q"), (0, "v"), (2, "q")}


def test_patterns_change_rank_and_alpha_of_what_they_match() -> None:
    manifest = compiled(
        rank_pattern={"q_proj": 2, r"layers\.[01]\.mlp\.up_proj": 1, "never_there": 9},
        alpha_pattern={"layers.2.self_attn.q_proj": 3, "q_proj": 5},
    )
    assert manifest.ranks[0, "q"] == 2
    assert manifest.ranks[1, "up"] == 1
    assert manifest.ranks[2, "up"] == 4
    assert manifest.scales[2, "q"] == 1.5
    assert manifest.scales[1, "q"] == 2.5
    assert manifest.scales[1, "up"] == 8.0


BAD_FIELDS: list[tuple[str, Any]] = [
    ("use_dora", True),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1, 2]),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_16"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "loftq"),
    ("lora_bias", True),
    ("layer_replication", [[0, 2]]),
    ("target_parameters", ["experts"]),
    ("fan_in_fan_out", True),
    ("use_qalora", True),
    ("alora_invocation_tokens", [5]),
    ("arrow_config", {"top_k": 3}),
    ("megatron_config", {"x": 1}),
    ("peft_type", "IA3"),
    ("task_type", "SEQ_CLS"),
    ("corda_config", {"x": 1}),
    ("lora_ga_config", {"x": 1}),
    ("use_bdlora", {"x": 1}),
    ("kasa_config", {"x": 1}),
    ("ensure_weight_tying", True),
    ("invented_by_peft_0_99", None),
    ("r", 0),
    ("r", -1),
    ("r", 4.0),
    ("r", True),
    ("r", "4"),
    ("r", None),
    ("lora_alpha", 0),
    ("lora_alpha", 1e400),
    ("lora_alpha", "8"),
    ("lora_alpha", 1e9),
    ("use_rslora", "yes"),
    ("target_modules", None),
    ("target_modules", []),
    ("target_modules", ["q_proj", "lm_head"]),
    ("target_modules", ["embed_tokens"]),
    ("target_modules", [1]),
    ("target_modules", ".*nothing_like_it"),
    ("target_modules", "("),
    ("target_modules", "(a?){60}" + "x" * 3_000),
    ("exclude_modules", 5),
    ("layers_to_transform", [3]),
    ("layers_to_transform", [-1]),
    ("layers_to_transform", "0"),
    ("layers_pattern", "blocks"),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", ["q_proj"]),
    ("alpha_pattern", {"q_proj": None}),
    ("alpha_pattern", {"(": 2}),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_refused_by_name(field: str, value: Any) -> None:
    text = json.dumps(config(**{field: value}))
    found = refused(text.encode())
    assert set(found) in ({f"adapter_config.{field}"}, {"adapter_config"})
    assert all(len(message) < 400 for message in found.values())


def test_a_pattern_that_backtracks_for_ever_is_cut_off() -> None:
    assert (
        "too long"
        in refused(config(target_modules=r"(model|[a-z.0-9_]+)*(\w|\.|.)*(x+x+)+y"))["adapter_config.target_modules"]
    )


def test_every_reason_at_once() -> None:
    found = refused(config(use_dora=True, bias="all", r=0, unknown=1, target_modules=["lm_head"]))
    assert set(found) == {f"adapter_config.{field}" for field in ("use_dora", "bias", "r", "unknown", "target_modules")}


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"r": NaN}', b'{"r": 1, "r": 2}', b"\xff\xfe", b"[" * 100_000, b"\x80\x04K\x01."],
)
def test_no_json_object(raw: bytes) -> None:
    assert set(refused(raw)) == {"adapter_config"}
