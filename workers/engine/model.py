"""The forward pass of a Llama-family model: the base once for the whole batch, each row's low-rank output on top.

Rows are tokens of any sequences, prefill and decode alike; a row's logits depend, to the bit, on its sequence's tokens
and its slot alone (operations.py). Keys and values of the rows are stored before any row attends, so that the rows of
one prompt chunk see each other.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.merging import Foldable
from workers.engine.model_config import ModelConfig
from workers.engine.operations import Batch, Heads, KvCache, Operations, Rope, Weight
from workers.engine.stacks import Adapted, SlotStacks
from workers.engine.weights import BaseWeights


@dataclass(frozen=True)
class _Projection:
    """Base matrices whose outputs stand side by side, and their adapted parts."""

    weight: Weight
    bias: Tensor | None
    adapted: list[list[Adapted]]  # per rank pool


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Projection
    o: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection
    cache: KvCache


class LlamaModel:
    """Loads the folder. `stacks` hold the adapters; `kv_tokens` positions fit the KV cache. Raises UnsupportedModel."""

    def __init__(self, folder: Path, operations: Operations, stacks: SlotStacks, kv_tokens: int) -> None:
        self.config = ModelConfig.of(folder)
        shape = self.config.shape
        self._ops = operations
        self._stacks = stacks
        rope = _rope(self.config)
        self._rope = rope.on(operations.device)
        self._heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
        weights = BaseWeights(folder, operations.device)
        embedding = weights.take("model.embed_tokens.weight", shape.vocab, shape.hidden)
        self._embedding = operations.weight(embedding)
        if self.config.tied:
            weights.drop("lm_head.weight", embedding)
            self._head = self._embedding
        else:
            self._head = operations.weight(weights.take("lm_head.weight", shape.vocab, shape.hidden))
        self.foldables: list[Foldable] = []
        self._norm = weights.vector("model.norm.weight", shape.hidden)
        self._layers = [self._layer(weights, layer, kv_tokens) for layer in range(shape.layers)]
        weights.finish()
        packed = (self._embedding, self._head, *(foldable.weight for foldable in self.foldables))
        products = sorted({weight.numeric_class for weight in packed if weight.numeric_class})
        # The rotation's tables come out of torch, whose last bit may differ from machine to machine.
        self.numeric_class = "/".join((operations.numeric_class, *products, f"rope-{_digest(rope)}"))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits [m, vocab] of the rows `batch.last`; the keys and values of all rows are stored."""
        ops, eps = self._ops, self.config.rms_norm_eps
        batch = batch.on(ops.device)
        x = ops.embed(self._embedding, batch.ids)
        added: Tensor | None = None
        for layer in self._layers:
            qkv = self._project(layer.qkv, ops.norm(x, added, layer.attention_norm, eps), batch)
            ops.rope_store(qkv, self._heads, self._rope, batch, layer.cache)
            attended = ops.attend(qkv, self._heads, batch, layer.cache)
            added = self._project(layer.o, attended, batch)
            gate_up = self._project(layer.gate_up, ops.norm(x, added, layer.mlp_norm, eps), batch)
            added = self._project(layer.down, ops.silu_mul(gate_up), batch)
        if added is not None:
            x += added
        return ops.linear(self._head, ops.norm(x[batch.last], None, self._norm, eps))

    def _project(self, projection: _Projection, x: Tensor, batch: Batch) -> Tensor:
        if batch.adapted:
            y = self._ops.project(projection.weight, x, self._stacks, projection.adapted, batch)
        else:
            y = self._ops.linear(projection.weight, x)
        if projection.bias is not None:
            y += projection.bias
        return y

    def _layer(self, weights: BaseWeights, layer: int, kv_tokens: int) -> _Layer:
        shape = self.config.shape
        prefix = f"model.layers.{layer}."

        def norm(name: str) -> Tensor:
            return weights.vector(f"{prefix}{name}.weight", shape.hidden)

        def projection(block: str, *names: str) -> _Projection:
            sizes = [shape.matrices()[name] for name in names]
            tensors = tuple(f"{prefix}{block}.{name}_proj.weight" for name in names)
            weight = self._ops.weight(
                *(weights.take(tensor, d, k) for tensor, (k, d) in zip(tensors, sizes, strict=True))
            )
            self.foldables.append(Foldable(layer, names, tensors, weight))
            return _Projection(
                weight,
                self._bias(weights, f"{prefix}{block}", names),
                self._stacks.adapted(layer, names),
            )

        return _Layer(
            attention_norm=norm("input_layernorm"),
            qkv=projection("self_attn", "q", "k", "v"),
            o=projection("self_attn", "o"),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=projection("mlp", "gate", "up"),
            down=projection("mlp", "down"),
            cache=KvCache.empty(kv_tokens // BLOCK_TOKENS, shape.kv_heads, shape.head_dim, self._ops.device),
        )

    def _bias(self, weights: BaseWeights, block: str, names: Sequence[str]) -> Tensor | None:
        """One bias for outputs that stand side by side, 0 where a matrix has none."""
        if not self.config.biased.intersection(names):
            return None
        sizes = self.config.shape.matrices()
        return torch.cat(
            [
                weights.vector(f"{block}.{name}_proj.bias", sizes[name][1])
                if name in self.config.biased
                else torch.zeros(sizes[name][1], device=self._ops.device)
                for name in names
            ]
        )


def _rope(config: ModelConfig) -> Rope:
    shape, rotation = config.shape, config.rotation
    angles = torch.outer(torch.arange(shape.context).float(), rotation.frequencies(shape.head_dim))
    return Rope(angles.cos() * rotation.attention_factor, angles.sin() * rotation.attention_factor)


def _digest(rope: Rope) -> str:
    tables = rope.cosine.numpy().tobytes() + rope.sine.numpy().tobytes()
    return hashlib.sha256(tables).hexdigest()[:8]
