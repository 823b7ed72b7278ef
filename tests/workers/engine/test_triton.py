"""The GPU's operations against their torch oracle: on a GPU where there is one, else under Triton's interpreter.

The interpreter must be chosen before Triton is first imported, so one test here runs all others in a process of its
own. Another compiles every kernel for real GPUs, which needs none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import MAX_RANK, adapter, rounded
from workers.engine import triton_kernels, triton_operations
from workers.engine.model import LlamaModel
from workers.engine.operations import Batch, Draws, Heads, KvCache, Operations, Rope
from workers.engine.reference import ReferenceOperations
from workers.engine.sampler import draw, noise, noises
from workers.engine.stacks import SlotStacks
from workers.engine.torch_runner import tokens_batch
from workers.engine.triton_operations import TritonOperations
from workers.slot_image import Precision, open_image, write_image

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
computes = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="no GPU: test_all_of_this_under_the_interpreter runs it"
)
# Grouped-query shapes: heads per KV head 3, 1 and 7; a width that is no power of two.
HEADS = [Heads(6, 2, 16), Heads(4, 4, 32), Heads(14, 2, 24)]
SLOTS = [0, 3, 3, 3, 3, 3, 0, 4, 5, 5, 3, 4, 1, 2]


@pytest.mark.skipif(INTERPRETED or DEVICE.type != "cpu", reason="the others here run it all themselves")
@pytest.mark.timeout(300)
def test_all_of_this_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("shrink", {"R": 16, "ROWS": 16, "COLUMNS": 64, "SPLIT": 512}),
        ("expand", {"R": 16, "ROWS": 16, "COLUMNS": 64}),
        ("norm", {"ADD": True, "WIDTH": 1024}),
        ("silu_mul", {"COLUMNS": 1024}),
        ("rope_store", {"PARTS": 16, "HALF": 32, "BLOCK": 16}),
        ("attend", {"GROUP": 4, "DIM": 64, "ROWS": 8, "KEYS": 32, "SPLIT": 512, "BLOCK": 16}),
        ("combine", {"HEADS": 16, "DIM": 64, "SPLIT": 512}),
    ],
)
def test_every_kernel_compiles_for_a_gpu(
    name: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, without tf32 and within the shared memory of any recent GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_kernels, name)
    integers = {"slots", "by_slot", "positions", "tables_of", "tables"}
    counts = {"n", "k", "d", "first", "count", "floats", "values", "width", "splits", "inner"}
    counts |= {"table_length", "heads", "kv_heads", "head_dim"}
    types = {"table": "*i64", "bf16": "*bf16", "f16": "*fp16", "eps": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(integers, "*i32") | dict.fromkeys(counts, "i32") | dict.fromkeys(sizes, "constexpr")
    if name not in ("shrink", "expand"):
        types["values"] = "*fp32"  # attention's
    signature = {argument: types.get(argument, "*fp32") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert compiled.asm["cubin"]
    assert "tf32" not in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 96 * 1024


@pytest.fixture(scope="module")
def ops() -> TritonOperations:
    return TritonOperations(DEVICE)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows, contexts and runs of one slot as short as these have several."""
    monkeypatch.setattr(triton_operations, "RUN", 4)
    monkeypatch.setattr(triton_operations, "SHRINK_SPLIT", 64)
    monkeypatch.setattr(triton_operations, "ATTEND_SPLIT", 32)


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(DEVICE)


def close(got: Tensor, expected: Tensor) -> None:
    assert (got.cpu() - expected.cpu()).abs().max() <= 3e-6 * expected.abs().max()


@computes
@pytest.mark.parametrize("width", [96, 576])
def test_norm_and_silu(ops: TritonOperations, width: int) -> None:
    reference = ReferenceOperations()
    x, add, gain = normal(7, width), normal(7, width) * 3, normal(width)
    mine, theirs = x.clone(), x.clone().cpu()
    whole = ops.norm(mine, add, gain, 1e-5)
    close(whole, reference.norm(theirs, add.cpu(), gain.cpu(), 1e-5))
    assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(ops.norm(x[3:4].clone(), add[3:4], gain, 1e-5)[0], whole[3])
    close(ops.norm(mine, None, gain, 1e-5), reference.norm(theirs, None, gain.cpu(), 1e-5))
    gate_up = normal(5, 2 * width) * 40  # far into both tails of the exponential
    close(ops.silu_mul(gate_up), reference.silu_mul(gate_up.cpu()))
    gate_up[2, 3] = float("nan")
    assert ops.silu_mul(gate_up).isnan().sum() == 1


@computes
def test_a_row_of_a_base_product_has_the_same_bits_in_any_batch(ops: TritonOperations) -> None:
    matrix, x = normal(331, 160), normal(130, 160)
    weight = ops.weight(matrix[:100], matrix[100:])
    whole = ops.linear(weight, x)
    close(whole, x @ matrix.T)
    for n in (1, 2, 31, 64, 65, 129):
        assert torch.equal(ops.linear(weight, x[:n].contiguous()), whole[:n])
        assert torch.equal(ops.linear(weight, x[n:].contiguous()), whole[n:])
    ids = torch.arange(331, dtype=torch.int32, device=DEVICE).flip(0)
    assert torch.equal(ops.embed(weight, ids), matrix.flip(0))


def cache_of(heads: Heads, device: torch.device) -> KvCache:
    """Full of NaN: what was never written must not be read."""
    shape = (9, heads.kv_heads)
    return KvCache(
        torch.full((*shape, heads.head_dim, 16), torch.nan, device=device),
        torch.full((*shape, 16, heads.head_dim), torch.nan, device=device),
    )


def turns(heads: Heads) -> Rope:
    angles = normal(128, heads.head_dim // 2).cpu()
    return Rope(angles.cos(), angles.sin())


def attention(operations: Operations, heads: Heads, chunk: int, length: int = 34) -> tuple[Tensor, KvCache]:
    """A sequence of `length` rows in chunks, its blocks scattered."""
    cache = cache_of(heads, operations.device)
    qkv = normal(length, (heads.heads + 2 * heads.kv_heads) * heads.head_dim).to(operations.device)
    out = []
    for begin in range(0, length, chunk):
        rows = qkv[begin : begin + chunk].clone()
        batch = tokens_batch([([1] * len(rows), begin, [7, 2, 5, 0])]).on(operations.device)
        operations.rope_store(rows, heads, turns(heads).on(operations.device), batch, cache)
        out.append(operations.attend(rows, heads, batch, cache))
    return torch.cat(out), cache


@computes
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("heads", HEADS)
def test_attention(ops: TritonOperations, heads: Heads) -> None:
    got, kept = attention(ops, heads, 34)
    expected, kept_there = attention(ReferenceOperations(), heads, 34)
    close(got, expected)
    for mine, theirs in ((kept.keys, kept_there.keys), (kept.values, kept_there.values)):
        assert torch.equal(mine.isnan().cpu(), theirs.isnan())
        close(mine.nan_to_num(), theirs.nan_to_num())
    if heads is HEADS[0]:
        assert torch.equal(attention(ops, heads, 7)[0], got)


@computes
@pytest.mark.usefixtures("short_splits")
def test_a_row_attends_to_the_same_bits_alone_and_in_company(ops: TritonOperations) -> None:
    heads, cache = HEADS[0], cache_of(HEADS[0], DEVICE)
    parts = [(34, [7, 2, 5]), (1, [4]), (9, [0]), (40, [1, 3, 8])]
    qkv = normal(sum(n for n, _ in parts), 10 * heads.head_dim)
    together = tokens_batch([([1] * n, 0, blocks) for n, blocks in parts]).on(DEVICE)
    ops.rope_store(qkv, heads, turns(heads).on(DEVICE), together, cache)
    whole = ops.attend(qkv, heads, together, cache)
    begin = 0
    for n, blocks in parts:
        last = begin + n - 1
        alone = tokens_batch([([1], n - 1, blocks)]).on(DEVICE)
        assert torch.equal(ops.attend(qkv[last : last + 1].contiguous(), heads, alone, cache)[0], whole[last])
        begin += n


@pytest.fixture
def stacks(shape: ModelShape, tmp_path: Path) -> tuple[SlotStacks, SlotStacks]:
    """On the device and on the CPU: slots 1 and 2 for rank 4, 3 to 5 for rank 8; slot 2 stays empty."""
    both = (SlotStacks(shape, {MAX_RANK: 3, 4: 2}, DEVICE), SlotStacks(shape, {MAX_RANK: 3, 4: 2}))
    for slot, rank, slot_rank in ((1, 3, 4), (3, 8, 8), (4, 5, 8), (5, 8, 8)):
        tensors = adapter(shape, slot, rank)
        if slot == 5:
            del tensors[1, "k"]
            tensors[1, "gate"] = (tensors[1, "gate"][0][:2], tensors[1, "gate"][1][:, :2].copy(), 3.0)
        write_image(tmp_path / "image", shape, slot_rank, "0" * 64, tensors)
        for each in both:
            each.fill(slot, open_image(tmp_path / "image", "0" * 64, shape, 4, 8))
    return both


def rows_with(slots: list[int]) -> Batch:
    return tokens_batch([([1], 0, [0])] * len(slots), slots)


@computes
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("matrices", [("q", "k", "v"), ("down",)])
def test_a_projection_with_adapters(
    ops: TritonOperations, stacks: tuple[SlotStacks, SlotStacks], matrices: tuple[str, ...]
) -> None:
    """Slots of two pools and none in one batch, many rows of one slot, an adapter without `k`, an empty slot."""
    device, host = stacks
    adapted = device.adapted(1, matrices)
    k, d = adapted[0][0].k, sum(of.d for of in adapted[0])
    x, matrix = normal(len(SLOTS), k), normal(d, k)
    reference, weight = ReferenceOperations(), ops.weight(matrix)
    mine = ops.project(weight, x, device, adapted, rows_with(SLOTS).on(DEVICE))
    close(mine, reference.project(reference.weight(matrix.cpu()), x.cpu(), host, adapted, rows_with(SLOTS)))
    base = ops.linear(weight, x)
    for row, slot in enumerate(SLOTS):
        assert torch.equal(mine[row], base[row]) == (slot in (0, 2))
    for row in (5, 7, 12):
        alone = ops.project(weight, x[row : row + 1], device, adapted, rows_with([SLOTS[row]]).on(DEVICE))
        assert torch.equal(alone[0], mine[row])
    if "k" in matrices:
        of = adapted[1][matrices.index("k")]
        assert torch.equal(mine[8:10, of.y : of.y + of.d], base[8:10, of.y : of.y + of.d])


@computes
def test_ranks_beyond_an_adapter_s_own_are_never_read(
    ops: TritonOperations, stacks: tuple[SlotStacks, SlotStacks]
) -> None:
    device, _ = stacks
    adapted = device.adapted(1, ("q", "k", "v"))
    of = adapted[1][0]
    x, weight = normal(3, of.k), ops.weight(normal(sum(m.d for m in adapted[1]), of.k))
    batch = rows_with([4, 4, 4]).on(DEVICE)
    before = ops.project(weight, x, device, adapted, batch)
    device.pools[1].a(4, of)[5:] = torch.nan
    device.pools[1].b(4, of)[:, 5:] = torch.nan
    assert torch.equal(ops.project(weight, x, device, adapted, batch), before)


@computes
@pytest.mark.usefixtures("short_splits")
def test_16_bits_that_keep_every_value_change_no_bit(ops: TritonOperations, shape: ModelShape, tmp_path: Path) -> None:
    """The same adapters in float32 slots and in narrow ones, both kinds in one batch beside a float32 one."""
    kinds = (Precision.BF16, Precision.F16, Precision.F32)
    full, narrow = SlotStacks(shape, {MAX_RANK: 3}, DEVICE), SlotStacks(shape, {MAX_RANK: 3}, DEVICE)
    for slot, kind in enumerate(kinds, 1):
        tensors = rounded(adapter(shape, slot), kind)
        for stacks, stored in ((full, Precision.F32), (narrow, kind)):
            write_image(tmp_path / "image", shape, MAX_RANK, "0" * 64, tensors, stored)
            stacks.fill(slot, open_image(tmp_path / "image", "0" * 64, shape, MAX_RANK))
    assert narrow.pools[0].data[:, 0].tolist() == [2, 3, 1]
    of = full.adapted(1, ("q", "k", "v"))[0]
    x, weight = normal(7, of[0].k), ops.weight(normal(sum(m.d for m in of), of[0].k))
    rows = rows_with([1, 2, 3, 1, 2, 0, 3]).on(DEVICE)
    expected, got = (ops.project(weight, x, each, each.adapted(1, ("q", "k", "v")), rows) for each in (full, narrow))
    assert torch.equal(got, expected)
    assert not torch.equal(got, ops.linear(weight, x))


def sampled(ops: TritonOperations, logits: Tensor, temperature: float, *cuts: float, seed: int = 5) -> list[int]:
    """cuts: top_p, top_k, min_p."""
    n, (top_p, top_k, min_p) = len(logits), cuts
    draws = Draws(
        torch.full((n,), seed),
        torch.arange(n),
        torch.full((n,), temperature),
        torch.full((n,), top_p),
        torch.full((n,), int(top_k), dtype=torch.int32),
        torch.full((n,), min_p),
    )
    ids: list[int] = ops.sample(logits, draws).tolist()
    return ids


@computes
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 0.9])
@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(1.0, 0, 0.0), (1e-300, 0, 0.0), (0.5, 0, 0.0), (0.8, 7, 0.0), (1.0, 1, 0.0), (1.0, 5000, 0.1), (0.9, 9, 0.05)],
)
def test_sampling_is_what_its_definition_says(
    ops: TritonOperations, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = normal(60, 331) * 2
    rows = enumerate(logits.cpu().numpy())
    expected = [draw(row, 5, at, temperature, top_p, top_k, min_p) for at, row in rows]
    got = sampled(ops, logits, temperature, top_p, top_k, min_p)
    # The exponentials may differ in their last bit, so a draw may fall on the other side of a boundary, hardly ever.
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1


@computes
def test_a_draw_depends_on_its_own_row_alone(ops: TritonOperations) -> None:
    logits = normal(6, 331)
    draws = Draws(
        torch.tensor([1, -2, 3, 4, 5, 6]),
        torch.arange(6),
        torch.tensor([0.0, 1.0, 1.0, 0.7, 1.0, 1.0]),
        torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 1.0]),
        torch.tensor([0, 0, 0, 9, 0, 0], dtype=torch.int32),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0]),
    )
    together = ops.sample(logits, draws)
    assert together.dtype == torch.int32
    for row in range(6):
        alone = ops.sample(logits[row : row + 1], Draws(*(each[row : row + 1] for each in draws)))
        assert alone[0] == together[row]


@computes
def test_ties_go_to_the_lowest_id_and_broken_logits_to_none(ops: TritonOperations) -> None:
    logits = torch.zeros(4, 64, device=DEVICE)
    logits[1, 40], logits[2, 9], logits[3, 63] = torch.nan, torch.inf, -torch.inf
    assert sampled(ops, logits, 0.0, 1.0, 0, 0.0) == [0, -1, -1, -1]
    assert sampled(ops, logits, 1.0, 0.5, 0, 0.0)[1:] == [-1, -1, -1]


def test_many_noises_are_the_noises_of_each() -> None:
    seeds, positions = torch.tensor([0, 5, -1, -(2**63), 2**63 - 1]), torch.tensor([0, 3, 7, 1, 123456])
    each = [noise(seed, at) for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert noises(seeds.numpy(), positions.numpy()).tolist() == each


def save_smallest(folder: Path) -> ModelShape:
    """Two layers and two heads over one KV head: the interpreter takes milliseconds for every program."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=67,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return ModelShape.of(folder)


def greedy(model: LlamaModel, slots: list[int], steps: int) -> tuple[list[list[int]], Tensor]:
    """Tokens of one prompt per slot, computed together, the first in two chunks; and the last step's logits."""
    prompts = [[(11 * i + 5 * n) % 67 for i in range(3 - n)] for n in range(len(slots))]
    model.forward(tokens_batch([(prompts[0][:2], 0, [0])], slots[:1]))
    starts, found = [2] + [0] * (len(slots) - 1), [list[int]() for _ in slots]
    logits = torch.empty(0)
    for _ in range(steps):
        told = [((prompts[n] + found[n])[starts[n] :], starts[n], [n]) for n in range(len(slots))]
        logits = model.forward(tokens_batch(told, slots)).cpu()
        starts = [start + len(ids) for ids, start, _ in told]
        for own, token in zip(found, logits.argmax(-1).tolist(), strict=True):
            own.append(token)
    return found, logits


@computes
def test_the_model_gives_the_reference_s_tokens(ops: TritonOperations, tmp_path: Path) -> None:
    shape = save_smallest(tmp_path)
    device, host = SlotStacks(shape, {4: 1, 8: 1}, DEVICE), SlotStacks(shape, {4: 1, 8: 1})
    for slot, slot_rank in ((1, 4), (2, 8)):
        write_image(tmp_path / "image", shape, slot_rank, "0" * 64, adapter(shape, slot, slot_rank - 1))
        for each in (device, host):
            each.fill(slot, open_image(tmp_path / "image", "0" * 64, shape, slot_rank))
    mine = LlamaModel(tmp_path, ops, device, 128)
    slots = [2, 0, 1]
    got, logits = greedy(mine, slots, 3)
    expected, expected_logits = greedy(LlamaModel(tmp_path, ReferenceOperations(), host, 128), slots, 3)
    assert got == expected
    assert (logits - expected_logits).abs().max() <= 1e-4 * expected_logits.abs().max()
    assert not torch.equal(logits[0], logits[1])
    # The same row by itself: the same bits.
    prompt = [5, 16]
    together = mine.forward(tokens_batch([(prompt[::-1], 0, [6]), (prompt, 0, [7])], [1, 2]))
    assert torch.equal(mine.forward(tokens_batch([(prompt, 0, [7])], [2]))[0], together[1])
