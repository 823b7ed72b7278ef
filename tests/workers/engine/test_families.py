"""Llama's relatives, each as transformers writes it: the same logits, or a refusal that names the field."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from streams.adapters.shape import ModelShape
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.model import LlamaModel
from workers.engine.model_config import ModelConfig, UnsupportedModel
from workers.engine.native import NativeOperations
from workers.engine.stacks import SlotStacks
from workers.engine.torch_runner import tokens_batch

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 331,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama-3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama-yarn-factors": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": YARN | {"attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2}},
    ),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (LlamaConfig, LlamaForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-yarn": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": YARN}),
}
PROMPT = [(i * i * 7 + 3) % 331 for i in range(200)]


def saved(folder: Path, name: str) -> PreTrainedModel:
    config, kind, options = FAMILIES[name]
    torch.manual_seed(3)
    model: PreTrainedModel = kind(config(**SIZES, **options)).eval()
    for part, parameter in model.named_parameters():
        if part.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    # In pieces: an index and several files.
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(native: NativeOperations, tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    ours = LlamaModel(tmp_path, native, SlotStacks(ModelShape.of(tmp_path), {4: 1}), 256)
    got = ours.forward(tokens_batch([(PROMPT, 0, list(range(-(-len(PROMPT) // BLOCK_TOKENS))))]))[0]
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_an_old_config_says_the_same(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top, "type" for "rope_type", as before transformers 5."""
    saved(tmp_path, "llama-3")
    new = ModelConfig.of(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    scaling = dict(fields.pop("rope_parameters"))
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    for name in ("rope_type", "type"):
        old = fields | {"rope_theta": theta, "rope_scaling": scaling | {name: kind}}
        (tmp_path / "config.json").write_text(json.dumps(old))
        assert ModelConfig.of(tmp_path) == new


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_windows_are_refused(tmp_path: Path, name: str, change: dict[str, Any], said: str) -> None:
    saved(tmp_path, name)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(UnsupportedModel, match=said):
        ModelConfig.of(tmp_path)


def test_a_window_that_goes_without_saying_is_refused(tmp_path: Path) -> None:
    """transformers takes a mistral without the field for one with a window of 4,096."""
    saved(tmp_path, "mistral")
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert MistralConfig.from_pretrained(tmp_path).sliding_window == 4096
    with pytest.raises(UnsupportedModel, match="sliding_window: missing"):
        ModelConfig.of(tmp_path)


@pytest.mark.parametrize("name", ["llama-3", "mistral", "qwen2"])
def test_a_field_left_out_is_refused_or_stands_for_what_transformers_takes(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name)
    fields = json.loads((tmp_path / "config.json").read_text())
    for field in fields:
        (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in fields.items() if n != field}))
        try:
            ours = ModelConfig.of(tmp_path)
        except UnsupportedModel:
            continue
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert getattr(theirs, "sliding_window", None) is None or getattr(theirs, "use_sliding_window", True) is False
        # A wrong number of KV heads does not fit the checkpoint's matrices.
        if field != "num_key_value_heads":
            head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
            assert (ours.shape.kv_heads, ours.shape.head_dim) == (theirs.num_key_value_heads, head_dim)
        assert (ours.tied, ours.rms_norm_eps) == (bool(theirs.tie_word_embeddings), theirs.rms_norm_eps)
        rope = theirs.rope_parameters
        assert (ours.rotation.kind, ours.rotation.theta) == (rope["rope_type"], rope["rope_theta"])


def test_a_width_that_is_not_used_is_none(tmp_path: Path) -> None:
    saved(tmp_path, "qwen2")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21})
    )
    ModelConfig.of(tmp_path)
