"""The real base model: transformers' tokens, PEFT's logits, and adapters that do not touch each other."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from schemas.engine import LoadSlot
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import InProcess, adapter, content_id, image, start
from workers.engine.native import NativeOperations
from workers.engine.torch_runner import TorchRunner, tokens_batch

pytestmark = pytest.mark.real
RANK, ADAPTERS, TOKENS, EOS = 16, 3, 10, 2
PROMPTS = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, *range(300, 300 + 17 * n)] for n in range(4)]


@pytest.fixture(scope="module")
def theirs(model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def runner(model: Path, native: NativeOperations) -> TorchRunner:
    return TorchRunner(model, "h", native, {RANK: ADAPTERS}, 1024)


@pytest.fixture(scope="module")
def loads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoadSlot]:
    folder, shape = tmp_path_factory.mktemp("images"), ModelShape.of(model)
    names = [f"real{seed}" for seed in range(ADAPTERS)]
    return [
        image(folder, shape, name, adapter(shape, seed, RANK, strength=0.04), RANK) for seed, name in enumerate(names)
    ]


def test_greedy_tokens_are_those_of_transformers(theirs: PreTrainedModel, runner: TorchRunner) -> None:
    engine = InProcess(runner, 1, 1024)
    engine.say(*(start(seq, prompt, max_tokens=TOKENS, stop_ids=[EOS]) for seq, prompt in enumerate(PROMPTS))).run()
    for seq, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        assert engine.tokens(seq) == out[0, len(prompt) :].tolist()


def test_an_adapter_gives_peft_s_logits(
    model: Path, runner: TorchRunner, loads: list[LoadSlot], theirs: PreTrainedModel
) -> None:
    tensors = adapter(ModelShape.of(model), 1, RANK, strength=0.04)
    names = [f"{matrix}_proj" for matrix in ("q", "k", "v", "o", "gate", "up", "down")]
    peft = get_peft_model(theirs, LoraConfig(r=RANK, lora_alpha=24, target_modules=names)).eval()
    for name, module in peft.named_modules():
        parts = name.split(".")
        if parts[-1] in names:
            a, b, _ = tensors[int(parts[4]), parts[-1].removesuffix("_proj")]
            module.lora_A["default"].weight.data = torch.from_numpy(a)
            module.lora_B["default"].weight.data = torch.from_numpy(b)
    InProcess(runner, ADAPTERS, 1024).say(*loads).run()
    with torch.inference_mode():
        expected = peft(torch.tensor([PROMPTS[3]])).logits[0, -1]
    peft.unload()
    got = runner.llama.forward(tokens_batch([(PROMPTS[3], 0, list(range(8)))], [2]))[0]
    base = runner.llama.forward(tokens_batch([(PROMPTS[3], 0, list(range(8)))], [0]))[0]
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (base - expected).abs().max() > 0.05 * expected.abs().max()


def test_adapters_at_once_and_each_alone_give_the_same_tokens(runner: TorchRunner, loads: list[LoadSlot]) -> None:
    wanted = [(seq, PROMPTS[seq % 4], ["", "real0", "real1", "real2"][seq // 2]) for seq in range(8)]
    together = InProcess(runner, ADAPTERS, 1024).say(*loads)
    together.say(*(start(seq, prompt, name, TOKENS) for seq, prompt, name in wanted)).run()
    assert max(step.adapters for step in together.steps()) == ADAPTERS
    for seq, prompt, name in wanted[::3]:
        alone = InProcess(runner, ADAPTERS, 1024)
        alone.say(*(load for load in loads if name and load.content_id == content_id(name)))
        assert alone.say(start(seq, prompt, name, TOKENS)).run().tokens(seq) == together.tokens(seq)


def test_a_prefix_from_the_cache_gives_the_same_tokens(runner: TorchRunner, loads: list[LoadSlot]) -> None:
    engine = InProcess(runner, ADAPTERS, 1024).say(*loads)
    for seq in range(2):
        engine.say(*(start(4 * seq + at, PROMPTS[3], name, TOKENS) for at, name in enumerate(["", "real0", "real1"])))
        engine.run()
    for at in range(3):
        assert (engine.finished(at).cached, engine.finished(4 + at).cached) == (0, 48)
        assert engine.tokens(at) == engine.tokens(4 + at)
