"""The C++ operations against their torch oracle, and their promise: bits that depend on a row alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import MAX_RANK, adapter, rounded
from workers.engine.compiled import NoCompiler, best_isa, isas, library
from workers.engine.native import NativeOperations
from workers.engine.operations import Batch, Draws, Heads, KvCache, Operations, Rope
from workers.engine.reference import ReferenceOperations
from workers.engine.sampler import draw, noise
from workers.engine.stacks import SlotStacks
from workers.engine.torch_runner import operations, tokens_batch
from workers.slot_image import Precision, open_image, write_image

# Grouped-query shapes: heads per KV head from 1 to 7, head widths with and without whole 64s.
HEADS = [Heads(6, 2, 16), Heads(4, 4, 32), Heads(9, 3, 64), Heads(14, 2, 80), Heads(5, 1, 128)]


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() <= 2e-6 * expected.abs().max() * 10


@pytest.mark.parametrize(("d", "k"), [(32, 16), (96, 160), (331, 96), (7, 32), (960, 576)])
@pytest.mark.parametrize("n", [1, 5, 12, 13, 33])
def test_linear_and_embed(native: NativeOperations, d: int, k: int, n: int) -> None:
    matrix, x = normal(d, k), normal(n, k)
    weight = native.weight(matrix)
    close(native.linear(weight, x), x @ matrix.T)
    ids = torch.arange(d, dtype=torch.int32).flip(0)
    assert torch.equal(native.embed(weight, ids), matrix.flip(0))


def test_a_row_of_a_product_has_the_same_bits_in_any_batch(native: NativeOperations) -> None:
    weight, x = native.weight(normal(331, 160)), normal(64, 160)
    whole = native.linear(weight, x)
    for n in range(1, 64):
        assert torch.equal(native.linear(weight, x[:n].contiguous()), whole[:n])
        assert torch.equal(native.linear(weight, x[n:].contiguous()), whole[n:])


def test_norm_and_silu(native: NativeOperations) -> None:
    reference = ReferenceOperations()
    x, add, gain = normal(7, 96), normal(7, 96) * 3, normal(96)
    mine, theirs = x.clone(), x.clone()
    close(native.norm(mine, add, gain, 1e-5), reference.norm(theirs, add, gain, 1e-5))
    assert torch.equal(mine, theirs)
    close(native.norm(mine, None, gain, 1e-5), reference.norm(theirs, None, gain, 1e-5))
    gate_up = normal(5, 192) * 40  # far into both tails of the exponential
    close(native.silu_mul(gate_up), reference.silu_mul(gate_up))
    gate_up[2, 3] = float("nan")
    assert native.silu_mul(gate_up).isnan().sum() == 1


def attention(operations: Operations, heads: Heads, chunk: int, length: int = 50) -> tuple[Tensor, KvCache]:
    """A sequence of `length` rows in chunks, its blocks scattered and the rest of the cache full of NaN."""
    cache = KvCache(
        torch.full((9, heads.kv_heads, heads.head_dim, 16), torch.nan),
        torch.full((9, heads.kv_heads, 16, heads.head_dim), torch.nan),
    )
    angles = normal(64, heads.head_dim // 2)
    qkv = normal(length, (heads.heads + 2 * heads.kv_heads) * heads.head_dim)
    out = []
    for begin in range(0, length, chunk):
        rows = qkv[begin : begin + chunk].clone()
        batch = tokens_batch([([1] * len(rows), begin, [7, 2, 5, 0])])
        operations.rope_store(rows, heads, Rope(angles.cos(), angles.sin()), batch, cache)
        out.append(operations.attend(rows, heads, batch, cache))
    return torch.cat(out), cache


@pytest.mark.parametrize("heads", HEADS)
def test_attention(native: NativeOperations, heads: Heads) -> None:
    got, kept = attention(native, heads, 50)
    expected, kept_there = attention(ReferenceOperations(), heads, 50)
    close(got, expected)
    for mine, theirs in ((kept.keys, kept_there.keys), (kept.values, kept_there.values)):
        assert torch.equal(mine.isnan(), theirs.isnan())
        close(mine.nan_to_num(), theirs.nan_to_num())
    for chunk in (1, 7, 16):
        assert torch.equal(attention(native, heads, chunk)[0], got)


@pytest.fixture
def stacks(shape: ModelShape, tmp_path: Path) -> SlotStacks:
    """Slots 1 and 2 for rank 4, 3 to 5 for rank 8; slot 2 stays empty."""
    stacks = SlotStacks(shape, {MAX_RANK: 3, 4: 2})
    for slot, rank, slot_rank in ((1, 3, 4), (3, 8, 8), (4, 5, 8), (5, 8, 8)):
        tensors = adapter(shape, slot, rank)
        if slot == 5:
            del tensors[1, "k"]
            tensors[1, "gate"] = (tensors[1, "gate"][0][:2], tensors[1, "gate"][1][:, :2].copy(), 3.0)
        write_image(tmp_path / "image", shape, slot_rank, "0" * 64, tensors)
        stacks.fill(slot, open_image(tmp_path / "image", "0" * 64, shape, 4, 8))
    return stacks


def rows_with(slots: list[int]) -> Batch:
    return tokens_batch([([1], 0, [0])] * len(slots), slots)


SLOTS = [0, 3, 3, 3, 3, 3, 0, 4, 5, 5, 3, 4, 1, 2]


@pytest.mark.parametrize("matrices", [("q", "k", "v"), ("gate", "up"), ("down",)])
def test_a_projection_with_adapters(native: NativeOperations, stacks: SlotStacks, matrices: tuple[str, ...]) -> None:
    adapted = stacks.adapted(1, matrices)
    k, d = adapted[0][0].k, sum(of.d for of in adapted[0])
    x, matrix = normal(len(SLOTS), k), normal(d, k)
    reference, weight = ReferenceOperations(), native.weight(matrix)
    mine = native.project(weight, x, stacks, adapted, rows_with(SLOTS))
    close(mine, reference.project(reference.weight(matrix), x, stacks, adapted, rows_with(SLOTS)))
    base = native.linear(weight, x)
    for row, slot in enumerate(SLOTS):
        alone = native.project(weight, x[row : row + 1].contiguous(), stacks, adapted, rows_with([slot]))
        assert torch.equal(alone[0], mine[row])
        assert torch.equal(mine[row], base[row]) == (slot in (0, 2))
    if "k" in matrices:
        k_outputs = adapted[1][matrices.index("k")]
        part = slice(k_outputs.y, k_outputs.y + k_outputs.d)
        assert torch.equal(mine[8:10, part], base[8:10, part])


def test_ranks_beyond_an_adapter_s_own_are_never_read(native: NativeOperations, stacks: SlotStacks) -> None:
    """A slot's larger rank changes no bit, and what it has beyond the adapter's own is not even looked at."""
    adapted = stacks.adapted(1, ("q", "k", "v"))
    of = adapted[1][0]
    x, weight = normal(3, of.k), native.weight(normal(sum(m.d for m in adapted[1]), of.k))
    before = native.project(weight, x, stacks, adapted, rows_with([4, 4, 4]))
    stacks.pools[1].a(4, of)[5:] = torch.nan
    stacks.pools[1].b(4, of)[:, 5:] = torch.nan
    assert torch.equal(native.project(weight, x, stacks, adapted, rows_with([4, 4, 4])), before)


def test_many_rows_of_one_slot_have_the_bits_of_each_alone(native: NativeOperations, stacks: SlotStacks) -> None:
    adapted = stacks.adapted(0, ("gate", "up"))
    x, weight = normal(70, adapted[0][0].k), native.weight(normal(sum(of.d for of in adapted[0]), adapted[0][0].k))
    whole = native.project(weight, x, stacks, adapted, rows_with([3] * 70))
    for first in range(0, 70, 7):
        part = native.project(weight, x[first : first + 3].contiguous(), stacks, adapted, rows_with([3] * 3))
        assert torch.equal(part, whole[first : first + 3])


def of_precisions(shape: ModelShape, folder: Path, *slots: tuple[Precision, Precision]) -> SlotStacks:
    """Slots 1.. of rank 8: what the values are rounded to, and what they are stored as."""
    stacks = SlotStacks(shape, {MAX_RANK: len(slots)})
    for slot, (nearest, stored) in enumerate(slots, 1):
        tensors = rounded(adapter(shape, slot), nearest)
        write_image(folder / "image", shape, MAX_RANK, "0" * 64, tensors, stored)
        stacks.fill(slot, open_image(folder / "image", "0" * 64, shape, MAX_RANK))
    return stacks


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable", "torch"])
@pytest.mark.parametrize("matrices", [("q", "k", "v"), ("down",)])
def test_16_bits_that_keep_every_value_change_no_bit(
    native: NativeOperations, shape: ModelShape, tmp_path: Path, isa: str, matrices: tuple[str, ...]
) -> None:
    """The same adapters in float32 slots and in narrow ones, of both kinds in one batch beside a float32 one."""
    if isa == "avx512" and isa not in isas():
        pytest.skip("this machine has no AVX-512")
    f32, kinds = Precision.F32, (Precision.BF16, Precision.F16, Precision.F32)
    full = of_precisions(shape, tmp_path, *((kind, f32) for kind in kinds))
    narrow = of_precisions(shape, tmp_path, *((kind, kind) for kind in kinds))
    assert narrow.pools[0].data[:, 0].tolist() == [2, 3, 1]
    of = full.adapted(1, matrices)[0]
    x, matrix = normal(14, of[0].k), normal(sum(m.d for m in of), of[0].k)
    operations: Operations = ReferenceOperations() if isa == "torch" else NativeOperations(2, isa)
    weight, rows = operations.weight(matrix), rows_with([1, 2, 3, 1, 1, 2, 0, 2, 2, 3, 2, 2, 1, 3])
    expected, got = (operations.project(weight, x, each, each.adapted(1, matrices), rows) for each in (full, narrow))
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(got, operations.linear(weight, x))
    NativeOperations(2, best_isa())  # the pool is the process': back to the fixture's


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable", "torch"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.F16])
def test_every_kind_of_16_bit_value_is_the_float32_it_stands_for(
    shape: ModelShape, tmp_path: Path, isa: str, precision: Precision
) -> None:
    """Of every exponent and sign, the smallest subnormal among them, each read alone: x has a single 1."""
    if isa == "avx512" and isa not in isas():
        pytest.skip("this machine has no AVX-512")
    k, d = shape.matrices()["down"]
    bits = torch.arange(k, dtype=torch.int32) * (65536 // k) + 1
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float16
    values = bits.to(torch.int16).view(dtype).float()
    values[~values.isfinite()] = 1.0
    assert ((values != 0) & (values.abs() < torch.finfo(dtype).tiny)).any()
    tensors = {(1, "down"): (values[None].numpy(), np.ones((d, 1), np.float32), 1.0)}
    write_image(tmp_path / "image", shape, MAX_RANK, "0" * 64, tensors, precision)
    stacks = SlotStacks(shape, {MAX_RANK: 1})
    stacks.fill(1, open_image(tmp_path / "image", "0" * 64, shape, MAX_RANK))
    operations: Operations = ReferenceOperations() if isa == "torch" else NativeOperations(2, isa)
    weight = operations.weight(torch.zeros(d, k))
    got = operations.project(weight, torch.eye(k), stacks, stacks.adapted(1, ("down",)), rows_with([1] * k))
    assert torch.equal(got, values[:, None].expand(k, d))
    NativeOperations(2, best_isa())  # the pool is the process': back to the fixture's


def test_a_slot_forgets_the_precision_of_the_one_before(
    native: NativeOperations, shape: ModelShape, tmp_path: Path
) -> None:
    """Float32 over bfloat16 over float16 in one slot gives what a fresh slot gives."""
    used = SlotStacks(shape, {MAX_RANK: 1})
    x = normal(5, 96)
    weight = native.weight(normal(160, 96))
    for precision in (Precision.F32, Precision.F16, Precision.BF16, Precision.F32):
        fresh = of_precisions(shape, tmp_path, (precision, precision))
        used.fill(1, open_image(tmp_path / "image", "0" * 64, shape, MAX_RANK))
        mine, theirs = (
            native.project(weight, x, each, each.adapted(0, ("q", "k", "v")), rows_with([1] * 5))
            for each in (used, fresh)
        )
        assert torch.equal(mine, theirs)


def sampled(
    operations: Operations,
    logits: Tensor,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 5,
) -> list[int]:
    n = len(logits)
    ids: list[int] = operations.sample(
        logits,
        Draws(
            torch.full((n,), seed),
            torch.arange(n),
            torch.full((n,), temperature),
            torch.full((n,), top_p),
            torch.full((n,), top_k, dtype=torch.int32),
            torch.full((n,), min_p),
        ),
    ).tolist()
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
def test_sampling_is_what_its_definition_says(native: NativeOperations, temperature: float, top_p: float) -> None:
    logits = normal(300, 331) * 3
    expected = [draw(row, 5, at, temperature, top_p) for at, row in enumerate(logits.numpy())]
    got = sampled(native, logits, temperature, top_p)
    # The exponentials differ in their last bit, so a draw may fall on the other side of a boundary, hardly ever.
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1
    assert sampled(native, logits[17:18], temperature, top_p)[0] == (
        got[17] if temperature == 0 else draw(logits[17].numpy(), 5, 0, temperature, top_p)
    )


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 330, 331, 5000])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_what_is_left_out_is_what_the_definition_says(
    native: NativeOperations, top_p: float, top_k: int, min_p: float
) -> None:
    logits = normal(200, 331) * 2
    expected = [draw(row, 5, at, 0.9, top_p, top_k, min_p) for at, row in enumerate(logits.numpy())]
    got = sampled(native, logits, 0.9, top_p, top_k, min_p)
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1
    if top_k == 1 or min_p == 1:
        assert got == logits.argmax(-1).tolist()
    if top_k == 7:
        allowed = logits.topk(7).indices
        assert all(token in allowed[at] for at, token in enumerate(got))


def test_sampling_follows_the_distribution(native: NativeOperations) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)
    counts = np.bincount(sampled(native, logits, 1.0, 1.0), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    counts = np.bincount(sampled(native, logits, 1.0, 0.7), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.625, 0.375, 0, 0], atol=0.03)
    # top_k first: 0.8 of what the three likeliest have (0.95) is 0.76, which the two likeliest reach.
    counts = np.bincount(sampled(native, logits, 1.0, 0.8, top_k=3), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.625, 0.375, 0, 0], atol=0.03)
    counts = np.bincount(sampled(native, logits, 1.0, 1.0, min_p=0.25), minlength=4) / 4000
    np.testing.assert_allclose(counts, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.03)


def test_ties_go_to_the_lowest_id_and_broken_logits_to_none(native: NativeOperations) -> None:
    logits = torch.zeros(4, 64)
    logits[1, 40], logits[2, 9], logits[3, 63] = torch.nan, torch.inf, -torch.inf
    assert sampled(native, logits, 0.0, 1.0) == [0, -1, -1, -1]
    assert sampled(native, logits, 1.0, 0.5)[1:] == [-1, -1, -1]


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert noise(5, 3) == noise(5, 3)
    values = {noise(seed, position) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for position in range(100)}
    assert len(values) == 500
    assert all(0 <= value < 1 for value in values)
    assert noise(-1, 0) == noise(2**64 - 1, 0)


def everything(operations: Operations, stacks: SlotStacks) -> list[Tensor]:
    x = normal(37, 96)
    weight = operations.weight(normal(331, 96))
    qkv, adapted = operations.weight(normal(160, 96)), stacks.adapted(2, ("q", "k", "v"))
    return [
        operations.project(qkv, x, stacks, adapted, rows_with([0, 1, 3, 4, 3, 5] * 6 + [3])),
        operations.linear(weight, x),
        operations.norm(x.clone(), None, normal(96), 1e-5),
        operations.silu_mul(x * 10),
        attention(operations, HEADS[2], 50)[0],
        attention(operations, HEADS[3], 9)[0],
        torch.tensor(sampled(operations, normal(50, 331), 0.8, 0.9)),
    ]


@pytest.mark.parametrize("make", [lambda: NativeOperations(1, best_isa()), lambda: NativeOperations(3, best_isa())])
def test_threads_change_no_bit(
    native: NativeOperations, stacks: SlotStacks, make: Callable[[], NativeOperations]
) -> None:
    expected = everything(native, stacks)
    other = make()
    try:
        got = everything(other, stacks)
    finally:
        NativeOperations(2, best_isa())  # the pool is the process': back to the fixture's
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_other_vectors_change_no_bit(native: NativeOperations, stacks: SlotStacks, isa: str) -> None:
    if isa not in isas()[1:]:
        pytest.skip("this machine's best vectors are not wider than these")
    got = everything(NativeOperations(1, isa), stacks)
    assert all(torch.equal(a, b) for a, b in zip(got, everything(native, stacks), strict=True))


def test_without_a_compiler_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NoCompiler, match="path"):
        library("portable")
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such header' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.setenv("LORAFLEET_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NoCompiler, match="no such header"):
        library("portable")


def test_a_compiler_that_refuses_the_best_instructions_builds_the_next(
    native: NativeOperations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if len(isas()) < 2:
        pytest.skip("this CPU has no vectors to do without")
    best, following, *_ = isas()
    older = tmp_path / "c++"
    refused = "*-mavx512bf16*" if best == "avx512bf16" else "*-mavx512f*" if best == "avx512" else "*-mavx2*"
    older.write_text(f'#!/bin/sh\ncase "$*" in {refused}) echo "unknown option" >&2; exit 1;; esac\nexec c++ "$@"\n')
    older.chmod(0o755)
    monkeypatch.setenv("CXX", str(older))
    monkeypatch.setenv("LORAFLEET_CACHE", str(tmp_path / "cache"))
    assert isinstance(operations(2), NativeOperations)
    (built,) = (tmp_path / "cache").glob("kernels-*.so")
    assert built.name.startswith(f"kernels-{following}-")
    monkeypatch.undo()
    NativeOperations(2, best)  # the pool is the process': back to the fixture's


def test_a_batch_knows_each_token_s_place() -> None:
    batch = tokens_batch([([5, 6, 7], 10, [3, 1]), ([8], 0, [2]), ([9, 4], 1, [4])], [0, 2, 1], [True, True, False])
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.positions.tolist() == [10, 11, 12, 0, 1, 2]
    assert batch.tables_of.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.tables.tolist() == [[3, 1], [2, 0], [4, 0]]
    assert batch.slots.tolist() == [0, 0, 0, 2, 1, 1]
    assert batch.by_slot.tolist() == [0, 1, 2, 4, 5, 3]
    assert batch.last.tolist() == [2, 3]
    assert batch.adapted


@pytest.mark.parametrize(("top_p", "min_p"), [(1 - 1e-9, 0.0), (1.0, 1e-46), (1 - 1e-9, 1e-46), (1e-46, 1.0)])
def test_what_a_float32_cannot_tell_from_all_is_all(native: NativeOperations, top_p: float, min_p: float) -> None:
    logits = normal(100, 331)
    expected = [draw(row, 5, at, 0.9, top_p, 0, min_p) for at, row in enumerate(logits.numpy())]
    assert sum(a != b for a, b in zip(sampled(native, logits, 0.9, top_p, 0, min_p), expected, strict=True)) <= 1


@pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-300])
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-40, 1e-38, 1e-9])
def test_almost_no_temperature_is_greedy(native: NativeOperations, temperature: float, top_p: float) -> None:
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))
    greedy = logits.argmax(-1).tolist()
    assert [draw(row, 5, at, temperature, top_p) for at, row in enumerate(logits.numpy())] == greedy
    assert sampled(native, logits, temperature, top_p) == greedy
