"""Bfloat16 weights where the CPU multiplies them: right, the same bits in any company, a numeric class of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from replay.engine_bench.bf16 import bf16_copy
from schemas.engine import Merge, Merged, Unmerge, Unmerged
from streams.adapters.shape import ModelShape
from tests.workers.engine.test_model import PROMPT, logits_of, ours, with_peft
from tests.workers.engine.test_operations import normal, rows_with
from tests.workers.engine.tiny import KV_TOKENS, MAX_RANK, InProcess, adapter, image, save_tiny, start
from workers.engine import bf16
from workers.engine.compiled import best_isa, isas
from workers.engine.merging import BF16_TOLERANCE, folded
from workers.engine.model import LlamaModel
from workers.engine.native import NativeOperations
from workers.engine.reference import ReferenceOperations
from workers.engine.stacks import SlotStacks
from workers.engine.torch_runner import TorchRunner
from workers.slot_image import open_image

needs_bf16 = pytest.mark.skipif(best_isa() != "avx512bf16", reason="this CPU has no avx512_bf16")


@pytest.fixture(scope="module")
def narrow(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_copy(tiny, tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture
def threads() -> Iterator[None]:
    """The pool is the process': back to the fixture's."""
    yield
    NativeOperations(2, best_isa())


def model(folder: Path, operations: NativeOperations | ReferenceOperations) -> LlamaModel:
    return LlamaModel(folder, operations, SlotStacks(ModelShape.of(folder), {4: 1}), 128)


def apart(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest value."""
    return float((got - expected).abs().max() / expected.abs().max())


@needs_bf16
@pytest.mark.parametrize(("d", "k"), [(32, 16), (96, 160), (331, 96), (7, 32), (960, 576), (64, 1536)])
@pytest.mark.parametrize("n", [1, 5, 12, 13, 33])
def test_a_product_is_that_of_both_rounded(native: NativeOperations, d: int, k: int, n: int) -> None:
    matrix, x = normal(d, k).bfloat16(), normal(n, k)
    weight = native.weight(matrix)
    assert weight.data.dtype is torch.bfloat16
    got = native.linear(weight, x)
    assert apart(got, (x.bfloat16().double() @ matrix.double().T).float()) <= 2e-6
    assert apart(got, (x.double() @ matrix.double().T).float()) > 1e-4  # float32 would be something else
    ids = torch.arange(d, dtype=torch.int32).flip(0)
    assert torch.equal(native.embed(weight, ids), matrix.float().flip(0))


@needs_bf16
def test_x_is_rounded_to_the_nearest_and_to_the_even_of_two(native: NativeOperations) -> None:
    x = normal(13, 96)
    x[:, ::3] = 1 + torch.arange(13)[:, None] * 2.0**-8  # halfway every second time
    assert torch.equal(native.linear(native.weight(torch.eye(96).bfloat16()), x), x.bfloat16().float())


@needs_bf16
def test_a_row_has_the_same_bits_in_any_batch(native: NativeOperations) -> None:
    weight, x = native.weight(normal(200, 160).bfloat16(), normal(131, 160).bfloat16()), normal(64, 160)
    whole = native.linear(weight, x)
    for n in range(1, 64):
        assert torch.equal(native.linear(weight, x[:n].contiguous()), whole[:n])
        assert torch.equal(native.linear(weight, x[n:].contiguous()), whole[n:])


@needs_bf16
@pytest.mark.parametrize("count", [1, 3])
def test_threads_change_no_bit(native: NativeOperations, threads: None, count: int) -> None:
    matrix, x = normal(700, 576).bfloat16(), normal(37, 576)
    expected = native.linear(native.weight(matrix), x)
    other = NativeOperations(count, best_isa())
    assert torch.equal(other.linear(other.weight(matrix), x), expected)


@needs_bf16
def test_adapters_are_added_from_the_float32_x(native: NativeOperations, shape: ModelShape, tmp_path: Path) -> None:
    stacks = SlotStacks(shape, {MAX_RANK: 2})
    load = image(tmp_path, shape, "a", adapter(shape, 1))
    stacks.fill(2, open_image(Path(load.path), load.content_id, shape, MAX_RANK))
    adapted = stacks.adapted(1, ("q", "k", "v"))
    k, d = adapted[0][0].k, sum(of.d for of in adapted[0])
    x, slots = normal(14, k), [2, 0, 2, 2, 0, 2, 2, 2, 2, 2, 0, 2, 2, 2]
    zero = native.weight(torch.zeros(d, k).bfloat16())
    reference = ReferenceOperations()
    expected = reference.project(reference.weight(torch.zeros(d, k)), x, stacks, adapted, rows_with(slots))
    assert apart(native.project(zero, x, stacks, adapted, rows_with(slots)), expected) <= 2e-5
    weight = native.weight(normal(d, k).bfloat16())
    whole = native.project(weight, x, stacks, adapted, rows_with(slots))
    for row, slot in enumerate(slots):
        alone = native.project(weight, x[row : row + 1].contiguous(), stacks, adapted, rows_with([slot]))
        assert torch.equal(alone[0], whole[row])


@needs_bf16
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_says_what_transformers_and_float32_say(native: NativeOperations, tmp_path: Path, tied: bool) -> None:
    folder = bf16_copy(save_tiny(tmp_path / "tiny", tied), tmp_path / "narrow")
    got = ours(model(folder, native), PROMPT)
    assert 1e-4 < apart(got, ours(model(folder, ReferenceOperations()), PROMPT)) < 2e-2
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    assert apart(got, logits_of(other, PROMPT).float()) < 6e-2  # rounds everything else too


@needs_bf16
def test_an_adapter_gives_peft_s_logits(
    native: NativeOperations, narrow: Path, shape: ModelShape, tmp_path: Path
) -> None:
    tensors = adapter(shape, 3)
    load = image(tmp_path, shape, "a", tensors)
    stacks = SlotStacks(shape, {MAX_RANK: 2})
    stacks.fill(2, open_image(Path(load.path), load.content_id, shape, MAX_RANK))
    mine = LlamaModel(narrow, native, stacks, 128)
    peft = with_peft(narrow, tensors, MAX_RANK)
    assert apart(ours(mine, PROMPT, slot=2), logits_of(peft, PROMPT)) < 6e-2
    # The base's products see x rounded, the adapter's see it whole: then far less is left.
    for name, module in peft.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora" not in name:
            module.register_forward_pre_hook(lambda _, given: (given[0].bfloat16().float(),))
    expected = logits_of(peft, PROMPT)
    assert apart(ours(mine, PROMPT, slot=2), expected) < 1e-2
    assert apart(ours(mine, PROMPT), expected) > 0.1


@needs_bf16
def test_tokens_are_the_same_alone_and_in_company(
    native: NativeOperations, narrow: Path, shape: ModelShape, tmp_path: Path
) -> None:
    runner = TorchRunner(narrow, "h", native, {MAX_RANK: 2}, KV_TOKENS)
    loads = [image(tmp_path, shape, name, adapter(shape, seed)) for seed, name in enumerate("ab")]
    starts = [start(seq, PROMPT[seq % 5 : 9 + seq * 2], ["", "a", "b"][seq % 3], 16) for seq in range(12)]
    together = InProcess(runner, 2).say(*loads, *starts).run()
    for seq in range(12):
        alone = InProcess(runner, 2).say(*loads, starts[seq]).run()
        assert alone.tokens(seq) == together.tokens(seq)


@needs_bf16
def test_a_merged_adapter_is_rounded_once_and_taken_out_to_the_bit(
    native: NativeOperations, narrow: Path, shape: ModelShape, tmp_path: Path
) -> None:
    tensors = adapter(shape, 1, strength=0.2)
    for layer in range(shape.layers):
        del tensors[layer, "k"]  # beside the others it stays the checkpoint's
    runner = TorchRunner(narrow, "h", native, {MAX_RANK: 2}, KV_TOKENS)
    before = [foldable.weight.data.clone() for foldable in runner.llama.foldables]
    load = image(tmp_path, shape, "x", tensors)
    engine = InProcess(runner, 2).say(load, Merge(load.content_id, load.path))
    event = engine.events[-1]
    assert isinstance(event, Merged)
    assert 1e-4 < event.worst <= event.tolerance == BF16_TOLERANCE
    checkpoint = load_file(narrow / "model.safetensors")
    for foldable, was in zip(runner.llama.foldables, before, strict=True):
        parts = []
        for matrix, name in zip(foldable.matrices, foldable.tensors, strict=True):
            part = checkpoint[name]
            if (foldable.layer, matrix) in tensors:
                a, b, scale = tensors[foldable.layer, matrix]
                part = folded(part, torch.from_numpy(a), torch.from_numpy(b), scale, lambda: None).bfloat16()
            parts.append(part)
        assert torch.equal(foldable.weight.data, native.weight(*parts).data)
        assert not torch.equal(foldable.weight.data, was)
    assert isinstance(engine.say(Unmerge()).events[-1], Unmerged)
    after = [foldable.weight.data for foldable in runner.llama.foldables]
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(after, before, strict=True))


def test_without_the_instruction_a_folder_is_computed_in_float32(narrow: Path, tmp_path: Path, threads: None) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    (wide / "config.json").write_text((narrow / "config.json").read_text())
    save_file(
        {name: t.float() for name, t in load_file(narrow / "model.safetensors").items()}, wide / "model.safetensors"
    )
    operations = NativeOperations(2, next(isa for isa in isas() if isa != "avx512bf16"))
    mine, expected = model(narrow, operations), model(wide, operations)
    assert mine.numeric_class == expected.numeric_class
    assert torch.equal(ours(mine, PROMPT), ours(expected, PROMPT))


@needs_bf16
def test_only_bfloat16_products_have_a_class_of_their_own(native: NativeOperations, tiny: Path, narrow: Path) -> None:
    in_float32, in_bf16 = (model(folder, native).numeric_class for folder in (tiny, narrow))
    assert in_float32.split("/")[:-1] == native.numeric_class.split("/")
    assert "bf16" not in in_float32
    assert in_bf16.startswith(f"{native.numeric_class}/bf16-pairs-")
    mixed = native.weight(normal(32, 16).bfloat16(), normal(32, 16))
    assert (mixed.data.dtype, mixed.numeric_class) == (torch.float32, "")


def test_the_class_shows_how_products_are_rounded() -> None:
    """Of three ways to add the same pairs, each in float32, no two have one class."""

    def pairs(weight: Tensor, x: Tensor, upper_first: bool, as_one: bool) -> Tensor:
        a, b = x.bfloat16().float(), weight.float()
        total = torch.zeros(len(a), len(b), dtype=torch.float32)
        for at in range(0, a.shape[1], 2):
            even, odd = (a[:, at + of, None].double() * b[:, at + of].double() for of in (0, 1))
            first, second = (odd, even) if upper_first else (even, odd)
            total = (total + (even + odd)).float() if as_one else ((total + first).float() + second).float()
        return total

    ways = [(True, False), (False, False), (False, True)]
    found = [bf16.numeric_class(lambda w, x, way=way: pairs(w, x, *way)) for way in ways]  # type: ignore[misc]
    assert len(set(found)) == 3
    assert found[0] == bf16.numeric_class(lambda w, x: pairs(w, x, True, False))


def test_every_machine_knows_what_it_can(tmp_path: Path) -> None:
    avx512 = "avx512f avx512dq avx512bw avx512vl"
    for flags, expected in (
        (f"fma avx2 f16c {avx512} avx512_bf16", ["avx512bf16", "avx512", "avx2", "portable"]),
        (f"fma avx2 f16c {avx512}", ["avx512", "avx2", "portable"]),
        ("fma avx2 f16c avx512_bf16", ["avx2", "portable"]),
        ("sse2", ["portable"]),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert isas(tmp_path / "cpuinfo") == expected
    assert isas(tmp_path / "none") == ["portable"]
