"""Adapters as PEFT saves them, of every kind that is served: its logits and the merged model's, all in one batch.

Each row of the table is a LoraConfig. Its weights are random and strong: the wrong adapter would change the next token.
"""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from schemas.engine import LoadSlot
from streams.adapters.manifest import compile_manifest
from streams.adapters.refusals import Refusals
from streams.adapters.shape import ModelShape
from streams.adapters.tensors import load_delta
from tests.workers.engine.tiny import InProcess, content_id, image
from workers.engine.native import NativeOperations
from workers.engine.torch_runner import TorchRunner, tokens_batch
from workers.slot_image import slot_rank

POOLS = (8, 16, 32, 64)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TABLE: dict[str, dict[str, Any]] = {
    **{f"rank-{r}": {"r": r, "lora_alpha": 2 * r, "target_modules": ALL} for r in (1, 2, 3, 5, 7, 8, 12, 16)},
    **{f"rank-{r}": {"r": r, "lora_alpha": r, "target_modules": ALL} for r in (17, 24, 31, 33, 48, 63, 64)},
    "alpha-below-rank": {"r": 16, "lora_alpha": 4, "target_modules": ALL},
    "alpha-of-one": {"r": 6, "lora_alpha": 1, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ALL},
    "rslora-odd": {"r": 13, "lora_alpha": 20, "use_rslora": True, "target_modules": "all-linear"},
    "all-linear": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rank-pattern": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 3, r"layers\.1.*up_proj": 40, "o_proj": 1},
    },
    "alpha-pattern": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "alpha_pattern": {"down_proj": 2, "layers.0.self_attn.q_proj": 64},
    },
    "patterns-and-rslora": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"v_proj": 11},
        "alpha_pattern": {"v_proj": 5, "k_proj": 3},
    },
    **{f"only-{name}": {"r": 9, "lora_alpha": 18, "target_modules": [name]} for name in ALL},
    "attention-only": {"r": 8, "lora_alpha": 16, "target_modules": ALL[:4]},
    "mlp-only": {"r": 8, "lora_alpha": 16, "target_modules": ALL[4:]},
    "one-layer": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "layers_to_transform": [1]},
    "outer-layers": {"r": 20, "lora_alpha": 16, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "expression": {"r": 10, "lora_alpha": 16, "target_modules": r".*layers\.[02]\..*\.(q|o|down)_proj"},
    "excluded": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "exclude_modules": ["layers.2.mlp.up_proj"]},
}
PROMPTS = [[(37 * n + i * i * 5 + 3) % 331 for i in range(3 + 11 * n)] for n in range(3)]
BLOCKS, SLOTS = 3, 24  # blocks of a prompt, slots of each pool


class Peft:
    """A model with one of the table's adapters on it."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        torch.manual_seed(zlib.crc32(name.encode()))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: PeftModel = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        for parameter in (p for n, p in self.model.named_parameters() if "lora_" in n):
            torch.nn.init.normal_(parameter, std=0.35 if parameter.shape[0] >= parameter.shape[1] else 0.2)

    def logits(self) -> Tensor:
        """[prompts, vocab], each at its prompt's end."""
        with torch.inference_mode():
            return torch.stack([self.model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])

    def merged(self) -> Tensor:
        self.model = self.model.merge_and_unload()
        return self.logits()

    def load(self, folder: Path, shape: ModelShape, name: str) -> LoadSlot:
        """The way of a registration: saved by PEFT, compiled by us, laid out for a slot."""
        self.model.save_pretrained(folder / "peft")
        refusals = Refusals()
        manifest = compile_manifest((folder / "peft/adapter_config.json").read_bytes(), shape, refusals)
        delta = load_delta(folder / "peft/adapter_model.safetensors", manifest, shape, refusals)
        assert not refusals
        assert delta is not None
        tensors = {place: (pair.a, pair.b, pair.scale) for place, pair in delta.items()}
        return image(folder, shape, name, tensors, slot_rank(max(len(a) for a, _, _ in tensors.values()), POOLS))


@pytest.fixture(scope="module")
def expected(tiny: Path, shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """name -> the load command, PEFT's logits, the merged model's."""
    found = {}
    for name, options in TABLE.items():
        peft = Peft(tiny, name, options)
        load = peft.load(tmp_path_factory.mktemp("adapter"), shape, name)
        found[name] = (load, peft.logits(), peft.merged())
    return found


@pytest.fixture(scope="module")
def ours(tiny: Path, native: NativeOperations, expected: dict[str, tuple[Any, ...]]) -> dict[str, Tensor]:
    """name -> logits [prompts, vocab] of one forward pass that has all adapters and the base ("") in it."""
    runner = TorchRunner(tiny, "h", native, dict.fromkeys(POOLS, SLOTS), 16 * BLOCKS * len(PROMPTS) * (len(TABLE) + 1))
    engine = InProcess(runner, [SLOTS] * len(POOLS)).say(*(load for load, _, _ in expected.values())).run()
    slots = {content: slot for content, (slot, _) in engine.slots.contents().items()}
    names = ["", *TABLE]
    parts: list[tuple[list[int], int, list[int]]] = []
    of: list[int] = []
    for name in names:
        for prompt in PROMPTS:
            parts.append((prompt, 0, [BLOCKS * len(parts) + at for at in range(BLOCKS)]))
            of.append(slots[content_id(name)] if name else 0)
    logits = runner.llama.forward(tokens_batch(parts, of))
    return {name: logits[len(PROMPTS) * at :][: len(PROMPTS)] for at, name in enumerate(names)}


@pytest.mark.parametrize("name", TABLE)
def test_logits_are_those_of_peft_and_of_the_merged_model(
    expected: dict[str, tuple[Any, ...]], ours: dict[str, Tensor], name: str
) -> None:
    _, peft, merged = expected[name]
    scale = peft.abs().max()
    assert (ours[name] - peft).abs().max() <= 1e-4 * scale
    assert (ours[name] - merged).abs().max() <= 1e-4 * scale


def test_the_wrong_adapter_would_say_something_else(ours: dict[str, Tensor]) -> None:
    """Or the table proves little: of all pairs of adapters (and the base), nearly all differ in some next token."""
    tokens = {name: tuple(logits.argmax(-1).tolist()) for name, logits in ours.items()}
    assert len(set(tokens.values())) >= len(tokens) - 2
