"""What the real PEFT writes is accepted, and means the same here as there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streams.adapters.manifest import compile_manifest, module_name
from streams.adapters.refusals import Refusals
from streams.adapters.tensors import load_delta
from tests.streams.adapters.files import TINY


@pytest.fixture(scope="module")
def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TINY.vocab,
            hidden_size=TINY.hidden,
            intermediate_size=TINY.intermediate,
            num_hidden_layers=TINY.layers,
            num_attention_heads=TINY.heads,
            num_key_value_heads=TINY.kv_heads,
            max_position_embeddings=TINY.context,
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": ["layers.1.self_attn.v_proj"]},
        {
            "target_modules": ["q_proj", "up_proj", "o_proj"],
            "layers_to_transform": [1, 2],
            "rank_pattern": {"q_proj": 2, r"layers\.2.*up_proj": 3},
            "alpha_pattern": {"layers.2.self_attn.q_proj": 3},
        },
    ],
)
def test_the_delta_is_that_of_peft(base: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    )
    model.save_pretrained(tmp_path)
    expected = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().numpy()
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and len(module.lora_A)
    }
    model.unload()

    refusals = Refusals()
    raw = (tmp_path / "adapter_config.json").read_bytes()
    assert len(json.loads(raw)) >= 35
    manifest = compile_manifest(raw, TINY, refusals)
    assert manifest is not None, refusals.found
    delta = load_delta(tmp_path / "adapter_model.safetensors", manifest, TINY, refusals)
    assert delta is not None, refusals.found
    assert {module_name(place) for place in delta} == set(expected)
    for place, pair in delta.items():
        np.testing.assert_allclose(pair.scale * pair.b @ pair.a, expected[module_name(place)], rtol=1e-4, atol=1e-6)


def test_an_untrained_adapter_is_refused(base: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    model.unload()
    refusals = Refusals()
    manifest = compile_manifest((tmp_path / "adapter_config.json").read_bytes(), TINY, refusals)
    assert manifest is not None
    assert load_delta(tmp_path / "adapter_model.safetensors", manifest, TINY, refusals) is None
    assert [reason.field for reason in refusals.found] == ["tensors"]
