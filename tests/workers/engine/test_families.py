"""Llama's relatives, each as transformers writes it: the same logits, or a refusal that names the field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from tests.workers.engine.tiny import save_tiny
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
    "llama-yarn-downhill": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 32}},
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


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias: True is not supported in a mistral"),
        ("mistral", {"mlp_bias": True}, "mlp_bias: True is not supported in a mistral"),
        ("llama-3", {"rope_scaling": LINEAR}, "rope_scaling: given beside rope_parameters"),
        ("llama-3", {"rope_parameters": "linear"}, "rope_parameters: 'linear' is not an object"),
        ("llama-3", {"rope_parameters": LINEAR | {"factor": 0}}, "rope_parameters.factor: 0"),
        ("llama-3", {"rope_parameters": LINEAR | {"factor": "4"}}, "rope_parameters.factor: '4'"),
        ("llama-3", {"rope_parameters": LLAMA3 | {"low_freq_factor": -1.0}}, "low_freq_factor: -1.0"),
        ("llama-3", {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor: 4.0"),
        ("llama-3", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_max_position"),
        ("llama-3", {"rope_parameters": YARN | {"attention_factor": 0.0}}, "attention_factor: 0.0"),
        ("llama-3", {"rope_parameters": YARN | {"beta_fast": 0}}, "beta_fast: 0"),
        ("llama-3", {"rope_parameters": YARN | {"truncate": None}}, "truncate: None"),
        ("llama-3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}}, "mscale: 0.7"),
        ("llama-3", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, "rope_type: 'dynamic'"),
        ("llama-3", {"rope_parameters": {"full_attention": YARN}}, "full_attention"),
        ("llama-3", {"rope_parameters": None, "rope_theta": None}, "rope_theta: None"),
        ("llama-3", {"rope_parameters": None, "rope_theta": 0}, "rope_theta: 0"),
        ("llama-3", {"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta: '1e4'"),
        ("llama-3", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("llama-3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ("llama-3", {"original_max_position_embeddings": 128}, "original_max_position_embeddings: 128"),
        ("llama-3", {"layer_types": ["full_attention"]}, "layer_types: 1 of them for 2"),
        ("llama-3", {"head_dim": 0}, "head_dim: 0"),
        ("llama-3", {"head_dim": "16"}, "head_dim: '16'"),
        ("llama-3", {"num_attention_heads": 0}, "num_attention_heads: 0"),
        ("llama-3", {"num_key_value_heads": 0}, "num_key_value_heads: 0"),
        ("llama-3", {"num_key_value_heads": 2.0}, "num_key_value_heads: 2.0"),
        ("llama-3", {"num_hidden_layers": True}, "num_hidden_layers: True"),
        ("llama-3", {"max_position_embeddings": None}, "max_position_embeddings: None"),
        ("llama-3", {"rms_norm_eps": None}, "rms_norm_eps: None"),
        ("llama-3", {"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5'"),
        ("llama-3", {"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
        ("llama-3", {"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false'"),
        ("llama-3", {"attention_bias": 1}, "attention_bias: 1"),
    ],
)
def test_what_would_give_other_logits_is_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    """Each of these crashed the engine at start, or was taken for something else than transformers takes it for."""
    saved(tmp_path, name)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(UnsupportedModel, match=re.escape(said)):
        ModelConfig.of(tmp_path)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("llama-3", {"is_llama_config": True, "rope_interleaved": False, "neftune_noise_alpha": None}),
        ("llama-3", {"unsloth_version": "2025.1.5", "unsloth_fixed": True, "_attn_implementation_autoset": True}),
        ("qwen2", {"use_mrope": False}),
    ],
)
def test_what_trainers_leave_in_a_config_changes_nothing(tmp_path: Path, name: str, left: dict[str, Any]) -> None:
    saved(tmp_path, name)
    plain = ModelConfig.of(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | left))
    assert ModelConfig.of(tmp_path) == plain


def test_a_tied_head_may_lie_there_as_a_copy_alone(native: NativeOperations, tmp_path: Path) -> None:
    """transformers does not tie the two where they differ, others do."""
    folder = save_tiny(tmp_path / "tied")
    path, stacks = folder / "model.safetensors", SlotStacks(ModelShape.of(folder), {4: 1})
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
    LlamaModel(folder, native, stacks, 256)
    head[5, 5] += 1
    save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings: true, but lm_head\.weight"):
        LlamaModel(folder, native, stacks, 256)


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
