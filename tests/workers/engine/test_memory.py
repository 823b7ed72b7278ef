from pathlib import Path

import pytest
import torch

from infra.local.model import packaged_model
from replay.engine_bench.bf16 import bf16_copy
from streams.adapters.shape import ModelShape
from tests.workers.engine.test_process import SLOTS, Spoken
from tests.workers.engine.tiny import MAX_RANK
from workers.engine.__main__ import VALUE_BYTES
from workers.engine.compiled import best_isa
from workers.engine.memory import Budget, base_bytes, fitted, kv_bytes, slot_bytes, workspace_bytes
from workers.engine.model import LlamaModel
from workers.engine.native import NativeOperations
from workers.engine.reference import ReferenceOperations
from workers.engine.scheduler import Limits
from workers.engine.stacks import SlotStacks
from workers.engine.weights import BaseWeights
from workers.slot_image import Precision, layout

GB, MB = 10**9, 10**6
GIVEN = Budget(80 * GB, 14 * GB, 33_600 * MB, 4 * GB)


def test_the_design_s_own_figures() -> None:
    """80 GB, a base of 14, a KV cache of 33.6, a workspace of 4, adapters of 80 MB."""
    assert GIVEN.adapter_bytes == 28_400 * MB
    assert GIVEN.slots(80 * MB) == 355
    assert GIVEN.slots(80 * MB, cap=250) == 250
    assert GIVEN.slots(800 * MB, cap=250) == 35


DESIGNED = ModelShape(
    layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000, context=4096
)


def test_the_design_s_figures_follow_from_its_model() -> None:
    """From the model's sizes alone, in values of 16 bits: the design rounds 13.5 GB up to 14, and 79.96 MB to 80."""
    assert kv_bytes(DESIGNED.layers, DESIGNED.kv_heads, DESIGNED.head_dim, 1, 2) == 524_288
    kv = kv_bytes(DESIGNED.layers, DESIGNED.kv_heads, DESIGNED.head_dim, 32 * 2000, 2)
    assert 0 <= GIVEN.kv_bytes - kv < 100 * MB
    assert layout(DESIGNED, 16).count == 39_976_960
    adapter = layout(DESIGNED, 16).bytes(Precision.BF16)
    assert 0 <= 80 * MB - adapter < 100_000
    base = base_bytes(DESIGNED, tied=False, biased=(), value_bytes=2)
    assert 0 <= GIVEN.base_bytes - base < 1 * GB
    assert Budget(80 * GB, base, kv, 4 * GB).slots(adapter) == 362
    assert workspace_bytes(DESIGNED, Limits(DESIGNED.vocab, DESIGNED.context, 32 * 2000)) < 4 * GB


def test_what_this_engine_makes_of_the_design_s_gpu() -> None:
    """Slots with room for float32 and a KV cache in it: half of each, as README's limits say."""
    base = base_bytes(DESIGNED, tied=False, biased=(), value_bytes=2)

    def budget(tokens: int) -> Budget:
        return Budget(80 * GB, base, kv_bytes(32, 32, 128, tokens, VALUE_BYTES), 4 * GB)

    assert fitted(budget(32_000), DESIGNED, {16: 250}) == {16: 181}
    with pytest.raises(MemoryError, match="give fewer KV tokens"):
        fitted(budget(64_000), DESIGNED, {16: 250})


def test_pools_fit_exactly_or_are_refused() -> None:
    assert GIVEN.spare_bytes({16: (355, 80 * MB)}) == 0
    assert GIVEN.spare_bytes({8: (100, 40 * MB), 16: (300, 80 * MB)}) == 400 * MB
    with pytest.raises(MemoryError, match="356 of rank 16"):
        GIVEN.spare_bytes({16: (356, 80 * MB)})


def test_a_base_that_leaves_no_room_is_refused() -> None:
    assert Budget(10, 5, 3, 2).slots(1) == 0
    with pytest.raises(MemoryError, match="1 more than"):
        Budget(10, 6, 3, 2).slots(1)


def test_kv_bytes_count_keys_and_values_of_every_layer() -> None:
    assert kv_bytes(layers=30, kv_heads=3, head_dim=64, tokens=16, value_bytes=4) == 2 * 30 * 3 * 64 * 16 * 4


def test_the_base_counts_as_many_bytes_as_its_loaded_tensors_have(native: NativeOperations) -> None:
    folder = packaged_model()
    shape = ModelShape.of(folder)
    model = LlamaModel(folder, native, SlotStacks(shape, {4: 1}), 64)
    weights = {id(each.weight): each.weight.data.nbytes for each in model.foldables}
    embedding, norms = shape.vocab * shape.hidden * 4, shape.hidden * (2 * shape.layers + 1) * 4
    assert base_bytes(shape, model.config.tied, model.config.biased, 4) == sum(weights.values()) + embedding + norms


def test_a_base_that_stays_in_bfloat16_counts_half(native: NativeOperations, tiny: Path, tmp_path: Path) -> None:
    folder = bf16_copy(tiny, tmp_path / "half")
    shape, stored = ModelShape.of(folder), BaseWeights(folder).dtype
    assert stored is torch.bfloat16
    model = LlamaModel(folder, native, SlotStacks(shape, {4: 1}), 64)
    held = {each.weight.data.dtype.itemsize for each in model.foldables}
    assert held == {native.value_bytes(stored)} == {2 if best_isa() == "avx512bf16" else 4}
    assert ReferenceOperations().value_bytes(stored) == 4
    assert BaseWeights(packaged_model()).dtype is torch.float32
    assert native.value_bytes(torch.float32) == 4


def test_biases_and_an_untied_head_count(shape: ModelShape) -> None:
    plain = base_bytes(shape, True, (), 2)
    assert base_bytes(shape, False, (), 2) - plain == shape.vocab * shape.hidden * 2
    assert base_bytes(shape, True, ("q", "down"), 2) - plain == shape.layers * 2 * shape.hidden * 4


def test_a_slot_counts_as_many_bytes_as_the_stack_gives_it(shape: ModelShape) -> None:
    stacks = SlotStacks(shape, {MAX_RANK: 3})
    assert stacks.pools[0].data.nbytes == 3 * slot_bytes(shape, MAX_RANK)


def test_a_single_pool_shrinks_to_what_fits_and_several_are_refused(shape: ModelShape) -> None:
    one = slot_bytes(shape, 8)
    assert fitted(Budget(10 * one, 2 * one, one, one), shape, {8: 250}) == {8: 6}
    assert fitted(Budget(10 * one, 2 * one, one, one), shape, {8: 5}) == {8: 5}
    with pytest.raises(MemoryError, match="1 of rank 8"):
        fitted(Budget(4 * one, 2 * one, one, one), shape, {8: 250})
    with pytest.raises(MemoryError, match="1 of rank 4, 7 of rank 8"):
        fitted(Budget(10 * one, 2 * one, one, one), shape, {4: 1, 8: 7})


def test_an_engine_makes_the_slots_that_its_memory_holds_or_does_not_start(tiny: Path, shape: ModelShape) -> None:
    kv = kv_bytes(shape.layers, shape.kv_heads, shape.head_dim, 2048, 4)
    rest = base_bytes(shape, True, (), 4) + kv + workspace_bytes(shape, Limits(shape.vocab, shape.context, 2048))
    size = slot_bytes(shape, MAX_RANK)
    for memory, slots in ((rest + size, 1), (rest + 2 * size - 1, 1), (rest + 9 * size, SLOTS)):
        engine = Spoken(tiny, "torch", "--memory-bytes", str(memory))
        ready = engine.hear()
        engine.close()
        assert getattr(ready, "slots", None) == slots
    engine = Spoken(tiny, "torch", "--memory-bytes", str(rest + size - 1))
    with pytest.raises((EOFError, ConnectionError)):
        engine.hear()
    assert engine.process.wait(20) == 1
    engine.close()
