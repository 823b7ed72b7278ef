"""The forward pass against transformers, and its adapters against PEFT."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from schemas.engine import LoadSlot
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import MAX_RANK, InProcess, Tensors, adapter, image, save_tiny, start
from workers.engine.model import LlamaModel
from workers.engine.model_config import ModelConfig, UnsupportedModel
from workers.engine.native import NativeOperations
from workers.engine.operations import Operations
from workers.engine.reference import ReferenceOperations
from workers.engine.stacks import SlotStacks
from workers.engine.torch_runner import TorchRunner, tokens_batch
from workers.slot_image import open_image

PROMPT = [(11 * i + 5) % 331 for i in range(37)]
MODULES = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}


def theirs(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def logits_of(model: PreTrainedModel | PeftModel, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def ours(model: LlamaModel, ids: list[int], slot: int = 0) -> Tensor:
    """Logits at every position, in one pass."""
    batch = tokens_batch([(ids, 0, [3, 1, 4])], [slot])
    return model.forward(dataclasses.replace(batch, last=torch.arange(len(ids))))


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_logits_are_those_of_transformers(native: NativeOperations, tmp_path: Path, tied: bool, sharded: bool) -> None:
    model = theirs(save_tiny(tmp_path / "whole", tied))
    folder = tmp_path / "whole"
    if sharded:
        folder = tmp_path / "sharded"
        model.save_pretrained(folder, max_shard_size="200KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    for operations in (native, ReferenceOperations()):
        got = ours(LlamaModel(folder, operations, SlotStacks(ModelShape.of(folder), {4: 1}), 128), PROMPT)
        close(got, logits_of(model, PROMPT))


def test_greedy_tokens_are_those_of_transformers(native: NativeOperations, tiny: Path) -> None:
    runner = TorchRunner(tiny, "h", native, {MAX_RANK: 1}, 256)
    model, ids = theirs(tiny), list(PROMPT)
    for _ in range(40):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    engine = InProcess(runner, 1, 256).say(start(1, PROMPT, max_tokens=40)).run()
    assert engine.tokens(1) == ids[len(PROMPT) :]


def with_peft(folder: Path, tensors: Tensors, rank: int) -> PeftModel:
    """The same adapter put into PEFT's own modules; 1.5 = alpha / r."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=1.5 * rank, target_modules=names, bias="none")
    model = get_peft_model(theirs(folder), config)
    modules = dict(model.named_modules())
    for (layer, matrix), (a, b, _) in tensors.items():
        module = modules[f"base_model.model.model.layers.{layer}.{MODULES.get(matrix, 'mlp')}.{matrix}_proj"]
        module.lora_A["default"].weight.data = torch.from_numpy(a)
        module.lora_B["default"].weight.data = torch.from_numpy(b)
    return model.eval()


@pytest.mark.parametrize("rank", [1, 5, MAX_RANK])
@pytest.mark.parametrize("make", [None, ReferenceOperations])
def test_adapters_are_those_of_peft(
    native: NativeOperations, tiny: Path, tmp_path: Path, shape: ModelShape, rank: int, make: type[Operations] | None
) -> None:
    tensors = adapter(shape, rank, rank)
    load: LoadSlot = image(tmp_path, shape, "a", tensors)
    stacks = SlotStacks(shape, {MAX_RANK: 2})
    stacks.fill(2, open_image(Path(load.path), load.content_id, shape, MAX_RANK))
    model = LlamaModel(tiny, make() if make else native, stacks, 128)
    expected = logits_of(with_peft(tiny, tensors, rank), PROMPT)
    close(ours(model, PROMPT, slot=2), expected)
    base = ours(model, PROMPT)
    assert (base - expected).abs().max() > 0.1 * expected.abs().max()
    close(base, logits_of(theirs(tiny), PROMPT))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma"),
        ("hidden_act", "gelu"),
        ("attention_bias", "yes"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": "longrope", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}),
        ("rope_parameters", {"rope_type": "linear", "factor": 0.0}),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("rope_interleaved", True),
        ("sliding_window", 128),
        ("quantization_config", {"bits": 4}),
        ("residual_multiplier", 0.2),
        ("head_dim", 24),
        ("num_key_value_heads", 4),
    ],
)
def test_a_field_that_is_not_implemented_is_refused_by_name(
    tiny: Path, tmp_path: Path, field: str, value: object
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UnsupportedModel, match=field):
        ModelConfig.of(tmp_path)


def test_a_config_with_a_plain_rope_theta_is_read(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_scaling": None}))
    assert ModelConfig.of(tmp_path).rotation.theta == 5e5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no such tensor"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}), "does not know"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(95)}), "expected floats of"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(96, dtype=torch.int8)}), "expected floats of"),
    ],
)
def test_every_tensor_is_used_once_or_the_model_is_refused(
    native: NativeOperations, tiny: Path, tmp_path: Path, change: object, said: str
) -> None:
    tensors = load_file(tiny / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=said):
        LlamaModel(tmp_path, native, SlotStacks(ModelShape.of(tiny), {4: 1}), 128)
