"""config.json of a Llama-family model: every field is applied, neutral, or refused by name."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from streams.adapters.shape import ModelShape
from workers.engine.rotation import Rotation, read_rotation

_APPLIED = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
}
_REQUIRED = {
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
}
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings")
# Fields that would change the result, and the values at which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "model_type": ("llama", "mistral", "qwen2"),
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "partial_rotary_factor": (1.0, None),
    "logits_soft_cap": (None,),
}
_CHECKED = {"rope_interleaved", "sliding_window", "layer_types"}  # below
_WITHOUT_EFFECT = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",  # SmolLM's trainer leaves these two
    "label2id",
    "max_window_layers",  # of sliding windows, which are refused
    "neftune_noise_alpha",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}
_LANES = 16


class UnsupportedModel(Exception):
    """The model has something that this engine does not compute; every reason, one a line."""


class ModelConfig(msgspec.Struct, frozen=True):
    shape: ModelShape
    rms_norm_eps: float
    rotation: Rotation
    tied: bool  # the head is the embedding
    biased: frozenset[str]  # the matrices, as in MATRICES, whose outputs have a bias

    @classmethod
    def of(cls, folder: Path) -> "ModelConfig":
        """Reads `folder`/config.json. Raises UnsupportedModel with every reason at once."""
        fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
        missing = _REQUIRED - fields.keys()
        reasons = [f"{name}: missing" for name in sorted(missing)] + _refusals(fields)
        rotation = read_rotation(fields, reasons)
        if reasons:
            raise UnsupportedModel("\n".join(reasons))
        shape = ModelShape.of(folder)
        sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "head_dim": shape.head_dim}
        reasons = [f"{name}: {size} is not a multiple of {_LANES}" for name, size in sizes.items() if size % _LANES]
        if shape.heads % shape.kv_heads:
            reasons.append(f"num_key_value_heads: {shape.kv_heads} does not divide {shape.heads} heads")
        if reasons:
            raise UnsupportedModel("\n".join(reasons))
        return cls(
            shape=shape,
            rms_norm_eps=fields["rms_norm_eps"],
            rotation=rotation,
            tied=bool(fields.get("tie_word_embeddings")),
            biased=_biased(fields),
        )


def _biased(fields: Mapping[str, Any]) -> frozenset[str]:
    if fields["model_type"] == "qwen2":
        return frozenset("qkv")  # always, and no field says so
    attention, mlp = fields.get("attention_bias"), fields.get("mlp_bias")
    return frozenset(("q", "k", "v", "o") if attention else ()) | frozenset(("gate", "up", "down") if mlp else ())


def _refusals(fields: Mapping[str, Any]) -> list[str]:
    reasons = _no_numbers(fields)
    for name, value in fields.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                reasons.append(f"{name}: {value!r} is not supported, only {_NEUTRAL[name][0]!r}")
        elif name not in _APPLIED | _CHECKED | _WITHOUT_EFFECT:
            reasons.append(f"{name}: {value!r}, a field this engine does not know")
    if fields.get("rope_interleaved"):
        reasons.append("rope_interleaved: True is not supported, only False")
    # Qwen2 writes a window's width even where none is used.
    idle = fields.get("model_type") == "qwen2" and fields.get("use_sliding_window") is False
    if fields.get("sliding_window") is not None and not idle:
        reasons.append(f"sliding_window: {fields['sliding_window']!r} is not supported, only None")
    if fields.get("model_type") == "mistral" and "sliding_window" not in fields:
        reasons.append("sliding_window: missing, which stands for 4096 in a mistral; null where there is none")
    layers = fields.get("layer_types")
    if layers is not None and layers != ["full_attention"] * len(layers):
        reasons.append(f"layer_types: {layers} is not supported, only full_attention")
    elif layers is not None and len(layers) != fields.get("num_hidden_layers"):
        reasons.append(f"layer_types: {len(layers)} of them for {fields.get('num_hidden_layers')} layers")
    for name in ("attention_bias", "mlp_bias"):
        if fields.get("model_type") == "mistral" and fields.get(name):
            reasons.append(f"{name}: {fields[name]!r} is not supported in a mistral, which has no biases")
    return reasons


def _no_numbers(fields: Mapping[str, Any]) -> list[str]:
    """What is not of the type that the engine computes with; what is missing is another's to say."""
    given = {name: value for name, value in fields.items() if value is not None or name in _REQUIRED}
    reasons = [
        f"{name}: {given[name]!r} is not a whole number above 0"
        for name in _COUNTS
        if name in given and (type(given[name]) is not int or given[name] < 1)
    ]
    eps = given.get("rms_norm_eps", 0.0)
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        reasons.append(f"rms_norm_eps: {eps!r} is not a number of at least 0")
    unclear = {name: given[name] for name in _SWITCHES if name in given and type(given[name]) is not bool}
    return reasons + [f"{name}: {value!r} is neither true nor false" for name, value in unclear.items()]
