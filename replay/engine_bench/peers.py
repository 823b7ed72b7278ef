"""The peers of `lorafleet bench engine`, each in a process of its own, with our threads, float32 and our prompts.

`python -m replay.engine_bench.peers PEER MODEL ADAPTERS THREADS REQUESTS PROMPT OUTPUT` prints one JSON line. Each does
its best: KV cache, no gradient, all requests in one batch of equal lengths so that nothing is padded.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from replay.engine_bench.rig import prompt

PEERS = ("transformers", "peft", "torch")


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; notes when each token was there."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generated(model: Any, ids: Tensor, output: int, **more: Any) -> tuple[float, list[float]]:
    """transformers' own loop: when it began, and when each token of all sequences was there."""
    clock = Clock()
    began = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=output,
        max_new_tokens=output,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
        **more,
    )
    if out.shape[1] != ids.shape[1] + output:
        raise RuntimeError(f"{out.shape[1] - ids.shape[1]} tokens instead of {output}")
    return began, clock.at


class Plain:
    """A loop as short as it can be: fused projections, torch's attention, a cache of fixed size, no adapters."""

    def __init__(self, model: Any) -> None:
        inner, config = model.model, model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps, self.inner = config.rms_norm_eps, inner
        self.head = model.lm_head.weight
        self.layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{n}_proj").weight for n in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in inner.layers
        ]

    def run(self, ids: Tensor, output: int) -> tuple[float, list[float]]:
        n, length = ids.shape
        size = (n, self.kv_heads, length + output, self.width)
        cache = [(torch.empty(size), torch.empty(size)) for _ in self.layers]
        at, began, start = [], time.perf_counter(), 0
        for _ in range(output):
            # Prompts go a few at a time: faster than all at once, whose activations leave the caches.
            parts = [self._forward(part, start, [(k[f:], v[f:]) for k, v in cache]) for f, part in _parts(ids)]
            start += ids.shape[1]
            ids = torch.cat(parts).argmax(-1, keepdim=True)
            at.append(time.perf_counter())
        return began, at

    def _forward(self, ids: Tensor, start: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        n, t = ids.shape
        x = self.inner.embed_tokens(ids)
        cosine, sine = self.inner.rotary_emb(x, torch.arange(start, start + t)[None])
        for (norm1, qkv, o, norm2, gate_up, down), (keys, values) in zip(self.layers, cache, strict=True):
            y = functional.linear(functional.rms_norm(x, x.shape[-1:], norm1, self.eps), qkv)
            y = y.view(n, t, -1, self.width).transpose(1, 2)
            turned, value = y[:, : self.heads + self.kv_heads], y[:, self.heads + self.kv_heads :]
            left, right = turned.chunk(2, -1)
            turned = turned * cosine[:, None] + torch.cat((-right, left), -1) * sine[:, None]
            keys[:n, :, start : start + t], values[:n, :, start : start + t] = turned[:, self.heads :], value
            seen = functional.scaled_dot_product_attention(
                turned[:, : self.heads], keys[:n, :, : start + t], values[:n, :, : start + t],
                is_causal=t > 1, enable_gqa=True,
            )  # fmt: skip
            x = x + functional.linear(seen.transpose(1, 2).reshape(n, t, -1), o)
            gate, up = functional.linear(functional.rms_norm(x, x.shape[-1:], norm2, self.eps), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        last = functional.rms_norm(x[:, -1], x.shape[-1:], self.inner.norm.weight, self.eps)
        return functional.linear(last, self.head)


def _parts(ids: Tensor) -> list[tuple[int, Tensor]]:
    """Sequences that go through the model together: four prompts, or every newest token."""
    together = 4 if ids.shape[1] > 1 else len(ids)
    return [(first, ids[first : first + together]) for first in range(0, len(ids), together)]


@torch.inference_mode()
def main(peer: str, folder: str, adapters: str, threads: int, requests: int, length: int, output: int) -> None:
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt(seq, length, model.config.vocab_size) for seq in range(requests)])
    if peer == "torch":
        plain = Plain(model)
        plain.run(ids[:, :8], 2)
        if not torch.equal(plain.head, model.get_output_embeddings().weight):
            raise RuntimeError("the plain loop has another head")
        began, at = plain.run(ids, output)
    else:
        more: dict[str, Any] = {}
        if peer == "peft":
            from peft import PeftModel

            names = [f"adapter-{number}" for number in range(requests)]
            model = PeftModel.from_pretrained(model, Path(adapters) / names[0], adapter_name=names[0])
            for name in names[1:]:
                model.load_adapter(Path(adapters) / name, adapter_name=name)
            model.eval()
            more["adapter_names"] = names
        generated(model, ids[:, :8], 2, **more)
        began, at = generated(model, ids, output, **more)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = {
        "tokens_s": requests * output / (at[-1] - began),
        "ttft_s": at[0] - began,
        "tpot_s": (at[-1] - at[0]) / max(1, output - 1),
        "peak_mib": peak_mib,
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
