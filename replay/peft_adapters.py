"""Random LoRA adapters in PEFT's format, strong enough that the wrong one would change what is said.

Their values are bfloat16's, as those of trained adapters mostly are.
"""

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from streams.adapters.shape import ModelShape

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def write_random(
    folder: Path,
    shape: ModelShape,
    seed: int,
    rank: int = 16,
    strength: float = 0.05,
    modules: Collection[str] = MODULES,
    layers: int | None = None,
) -> Path:
    """A folder with adapter_config.json and adapter_model.safetensors. B's deviation is `strength`, alpha = rank.

    `layers`: the first ones alone.
    """
    adapted = range(shape.layers if layers is None else layers)
    random = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in adapted:
        for name, (k, d) in ((name, size) for name, size in shape.matrices().items() if name in modules):
            stem = f"base_model.model.model.layers.{layer}.{MODULES[name]}"
            tensors[f"{stem}.lora_A.weight"] = _bfloat16(random.standard_normal((rank, k)) / k**0.5)
            tensors[f"{stem}.lora_B.weight"] = _bfloat16(random.standard_normal((d, rank)) * strength)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(MODULES[name].split(".")[1] for name in modules),
    }
    if layers is not None:
        config["layers_to_transform"] = list(adapted)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _bfloat16(values: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.bfloat16)
