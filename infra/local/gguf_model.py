"""A Llama-family GGUF file turned into a Hugging Face folder in float32: config, weights, tokenizer, chat template.

Deterministic: the same file gives the same bytes on every machine, so that everyone's base hash is the same.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL, USER_DEFINED = 3, 4  # token types
ENDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Unconvertible(Exception):
    """The file holds what this conversion does not know; the message names it."""


def convert(source: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Raises Unconvertible.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise Unconvertible(f"{source.name}: architecture {fields['general.architecture']}; only llama is known")
    tensors = _tensors(reader, fields)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(fields, tied="lm_head.weight" not in tensors))
    ends = {name: fields.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in ENDS.items()}
    _write(folder / "generation_config.json", ends)
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(fields))


def _tensors(reader: Any, fields: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        outer, _, rest = tensor.name.partition(".")
        if outer in OUTER and rest == "weight":
            name = OUTER[outer]
        else:
            _, layer, kind, weight = (*tensor.name.split("."), "", "", "")[:4]
            if outer != "blk" or kind not in INNER or weight != "weight":
                raise Unconvertible(f"tensor {tensor.name} is unknown")
            name = f"model.layers.{layer}.{INNER[kind]}"
            if kind in heads:
                values = _halves(values, heads[kind])
        tensors[f"{name}.weight"] = values
    return tensors


def _halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF has the rotated dimensions of each head as pairs (2i, 2i + 1); Hugging Face as halves (i, i + d/2)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        # A float32 in the file: 9.999999747e-06 was written as 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
        **{name: fields.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in ENDS.items()},
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise Unconvertible(f"pre-tokenizer {fields['tokenizer.ggml.pre']}; only smollm is known")
    texts, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {text: number for number, text in enumerate(texts)}
    # Byte-level symbols hold no space, so each line of merges is two symbols with one between them.
    merges = [(left, right) for left, right in (line.split(" ") for line in fields["tokenizer.ggml.merges"])]
    if lost := [left + right for left, right in merges if left + right not in vocabulary]:
        raise Unconvertible(f"the merge to {lost[0]!r} leads out of the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(texts, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in kinds if kind == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, kind in kinds if kind == USER_DEFINED])
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(texts):
        raise Unconvertible("the tokenizer has another number of tokens than the model")
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    texts = fields["tokenizer.ggml.tokens"]

    def text(kind: str) -> str | None:
        number = fields.get(f"tokenizer.ggml.{kind}_token_id")
        return None if number is None else str(texts[number])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "unk_token": text("unknown"),
        "pad_token": text("padding"),
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
