"""config.json of a Llama-family model: every field is applied, neutral, or refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from streams.adapters.shape import ModelShape

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
    "tie_word_embeddings",
}
# Fields that would change the result, and the values at which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "partial_rotary_factor": (1.0, None),
    "logits_soft_cap": (None,),
}
_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "rope_interleaved",  # written false by the converters of some families; refused below when true
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "use_cache",
}
_LANES = 16


class UnsupportedModel(Exception):
    """The model has something that this engine does not compute; every reason, one a line."""


class ModelConfig(msgspec.Struct, frozen=True):
    shape: ModelShape
    rms_norm_eps: float
    rope_theta: float
    tied: bool  # the head is the embedding

    @classmethod
    def of(cls, folder: Path) -> "ModelConfig":
        """Reads `folder`/config.json. Raises UnsupportedModel with every reason at once."""
        fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
        missing = {"model_type", "hidden_size", "rms_norm_eps", "vocab_size"} - fields.keys()
        reasons = [f"{name}: missing" for name in sorted(missing)] + _refusals(fields)
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
            rope_theta=_rope(fields).get("rope_theta", fields.get("rope_theta", 10000.0)),
            tied=fields.get("tie_word_embeddings", False),
        )


def _rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields.get("rope_parameters") or {}


def _refusals(fields: Mapping[str, Any]) -> list[str]:
    reasons = []
    for name, value in fields.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                reasons.append(f"{name}: {value!r} is not supported, only {_NEUTRAL[name][0]!r}")
        elif name not in _APPLIED and name not in _WITHOUT_EFFECT:
            reasons.append(f"{name}: {value!r}, a field this engine does not know")
    if fields.get("rope_interleaved"):
        reasons.append("rope_interleaved: True is not supported, only False")
    for name, value in _rope(fields).items():
        neutral = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
        if name != "rope_theta" and (name not in neutral or value != neutral[name]):
            reasons.append(f"rope_parameters.{name}: {value!r} is not supported")
    return reasons
