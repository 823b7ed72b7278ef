"""Merged mode: one adapter in W itself, the same tokens as in a slot, nobody else's, and the base back to the bit."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from schemas.engine import LoadSlot, Merge, Merged, MergeFailed, SlotFailed, SlotLoaded, Step, Unmerge, Unmerged
from schemas.reasons import FinishReason
from streams.adapters.shape import ModelShape
from tests.workers.engine.test_families import saved
from tests.workers.engine.test_peft import POOLS, PROMPTS, TABLE, Peft
from tests.workers.engine.tiny import (
    KV_TOKENS,
    MAX_RANK,
    InProcess,
    Tensors,
    adapter,
    content_id,
    image,
    save_tiny,
    start,
)
from workers.engine.engine import Engine
from workers.engine.merging import TOLERANCE, BaseChanged, folded
from workers.engine.native import NativeOperations
from workers.engine.operations import Operations
from workers.engine.reference import ReferenceOperations
from workers.engine.runner import Runner
from workers.engine.simulated import SimulatedRunner
from workers.engine.slots import NO_ADAPTER, Lease, Slots
from workers.engine.torch_runner import TorchRunner, tokens_batch

PROMPT = [(i * i * 5 + 3) % 331 for i in range(45)]


@pytest.fixture(scope="module", params=["native", "reference"])
def computing(request: pytest.FixtureRequest, native: NativeOperations) -> Operations:
    return native if request.param == "native" else ReferenceOperations()


@pytest.fixture(params=["native", "simulated"])
def runner(request: pytest.FixtureRequest, native: NativeOperations, tiny: Path, shape: ModelShape) -> Runner:
    if request.param == "simulated":
        return SimulatedRunner(shape, "h", [MAX_RANK], 0, 0)
    return TorchRunner(tiny, "h", native, {MAX_RANK: 2}, KV_TOKENS)


def merge(load: LoadSlot) -> Merge:
    return Merge(load.content_id, load.path)


def logits(runner: TorchRunner, slot: int = 0) -> Tensor:
    blocks = list(range(3))
    return torch.cat([runner.llama.forward(tokens_batch([(prompt, 0, blocks)], [slot])) for prompt in PROMPTS])


def weights(runner: TorchRunner) -> list[Tensor]:
    return [foldable.weight.data.clone() for foldable in runner.llama.foldables]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def last(engine: InProcess, kind: type[Merged] | type[Unmerged] | type[MergeFailed]) -> Merged | Unmerged | MergeFailed:
    assert isinstance(engine.events[-1], kind)
    return engine.events[-1]


KINDS = ("rank-5", "rank-63", "rslora-odd", "patterns-and-rslora", "rank-pattern", "only-k_proj", "expression")


@pytest.mark.parametrize("name", KINDS)
def test_merged_logits_are_those_of_peft_merged(
    tiny: Path, shape: ModelShape, computing: Operations, tmp_path: Path, name: str
) -> None:
    peft = Peft(tiny, name, TABLE[name])
    load = peft.load(tmp_path, shape, name)
    expected = peft.merged()
    runner = TorchRunner(tiny, "h", computing, dict.fromkeys(POOLS, 1), KV_TOKENS)
    engine = InProcess(runner, [1] * len(POOLS))
    base, before = logits(runner), weights(runner)
    event = last(engine.say(merge(load)), Merged)
    assert isinstance(event, Merged)
    assert event.worst <= event.tolerance == TOLERANCE
    assert (logits(runner) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (logits(runner) - base).abs().max() > 1e-2 * base.abs().max()
    last(engine.say(Unmerge()), Unmerged)
    assert same(weights(runner), before)
    assert torch.equal(logits(runner), base)


def test_biases_stay_beside_what_is_merged(native: NativeOperations, tmp_path: Path) -> None:
    saved(tmp_path, "qwen2")  # in several files
    shape = ModelShape.of(tmp_path)
    peft = Peft(tmp_path, "rslora", TABLE["rslora"])
    load = peft.load(tmp_path, shape, "rslora")
    runner = TorchRunner(tmp_path, "h", native, {16: 1}, KV_TOKENS)
    engine, expected = InProcess(runner, 1).say(merge(load)), peft.merged()
    assert isinstance(engine.events[-1], Merged)
    assert (logits(runner) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_sum_is_rounded_once_and_has_one_order() -> None:
    torch.manual_seed(5)
    weight, a, b = torch.randn(130, 48).bfloat16(), torch.randn(7, 48), torch.randn(130, 7)
    exact = weight.double() + 0.37 * sum(torch.outer(b[:, r].double(), a[r].double()) for r in range(7))
    got = folded(weight, a, b, 0.37, lambda: None)
    assert torch.equal(got, exact.float())
    assert torch.equal(got[:1], folded(weight[:1], a, b[:1], 0.37, lambda: None))


def test_tokens_are_those_of_the_slot_and_then_the_bases_again(
    runner: Runner, shape: ModelShape, tmp_path: Path
) -> None:
    load = image(tmp_path, shape, "x", adapter(shape, 1, strength=0.2))
    engine = InProcess(runner, 2).say(load, start(1, PROMPT, "x"), start(2, PROMPT)).run()
    event = last(engine.say(merge(load)), Merged)
    assert isinstance(event, Merged)
    assert event.numeric_class.startswith(runner.model.numeric_class + "/merged-")
    assert 0 <= event.worst <= event.tolerance
    engine.say(start(3, PROMPT, "x"), start(4, PROMPT, "x")).run()
    assert engine.tokens(3) == engine.tokens(4) == engine.tokens(1) != engine.tokens(2)
    assert (engine.finished(3).slot, engine.finished(3).epoch) == (0, event.epoch)
    back = last(engine.say(Unmerge()), Unmerged)
    assert isinstance(back, Unmerged)
    assert (back.content_id, back.numeric_class) == (content_id("x"), runner.model.numeric_class)
    engine.say(start(5, PROMPT, "x"), start(6, PROMPT)).run()
    assert (engine.tokens(5), engine.tokens(6)) == (engine.tokens(1), engine.tokens(2))
    again = last(engine.say(merge(load)), Merged)
    assert isinstance(again, Merged)
    assert (again.numeric_class, again.epoch) == (event.numeric_class, event.epoch + 1)
    assert engine.slots.leased == 0


def test_only_the_merged_content_runs(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    x, y = (image(tmp_path, shape, name, adapter(shape, seed, strength=0.2)) for seed, name in enumerate("xy"))
    engine = InProcess(runner, 2).say(y, merge(x)).run()
    engine.say(start(1, PROMPT, "y"), start(2, PROMPT), start(3, PROMPT, "never seen"), start(4, PROMPT, "x")).run()
    for seq in (1, 2, 3):
        ended = engine.finished(seq)
        assert (ended.reason, ended.length) == (FinishReason.ERROR, 0)
        assert ended.detail.startswith("content_id: ")
        assert f"{content_id('x')} is merged into the weights" in ended.detail
    assert engine.finished(4).reason is FinishReason.LENGTH


def test_it_waits_for_nobody(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    """In use it is refused, both ways and whether sequences run or wait; nothing has changed then."""
    x, y = (image(tmp_path, shape, name, adapter(shape, seed, strength=0.2)) for seed, name in enumerate("xy"))
    engine = InProcess(runner, 2).say(start(1, PROMPT), merge(x))
    assert last(engine, MergeFailed) == MergeFailed(content_id("x"), "in use: 0 sequences run, 1 wait; drain first")
    engine.engine.step()
    assert last(engine.say(merge(x)), MergeFailed).reason.startswith("in use: 1 sequences run")  # type: ignore[union-attr]
    engine.run().say(Unmerge())
    assert last(engine, Unmerged) == Unmerged("", runner.model.numeric_class, 0.0)
    engine.say(merge(x), start(2, PROMPT, "x"))
    engine.engine.step()
    engine.say(Unmerge())
    assert last(engine, MergeFailed).content_id == content_id("x")
    engine.run().say(merge(y))
    assert last(engine, MergeFailed) == MergeFailed(content_id("y"), f"{content_id('x')} is merged; Unmerge first")
    engine.say(merge(x))
    assert next(event for event in engine.events if isinstance(event, Merged)) == engine.events[-1]
    assert isinstance(engine.say(Unmerge()).events[-1], Unmerged)


def test_prefixes_are_kept_apart_and_outlive_a_merge(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    load = image(tmp_path, shape, "x", adapter(shape, 1, strength=0.2))
    engine = InProcess(runner, 2, kv_tokens=160).say(load, start(1, PROMPT, "x"), start(2, PROMPT)).run()
    engine.say(merge(load), start(3, PROMPT, "x")).run()
    engine.say(start(4, PROMPT, "x")).run()
    engine.say(Unmerge(), start(5, PROMPT, "x"), start(6, PROMPT)).run()
    assert [engine.finished(seq).cached for seq in (3, 4)] == [0, 32]
    assert (engine.tokens(5), engine.tokens(6)) == (engine.tokens(1), engine.tokens(2))
    assert engine.scheduler.free_blocks == 10


def test_a_merge_uses_no_block_that_holds_a_prefix(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    """What its probes write must not pass for a prompt's keys and values."""
    load = image(tmp_path, shape, "x", adapter(shape, 1, strength=0.2))
    engine = InProcess(runner, 2, kv_tokens=64).say(start(1, PROMPT)).run()
    engine.say(merge(load), Unmerge(), start(2, PROMPT)).run()
    assert engine.tokens(2) == engine.tokens(1)
    assert engine.finished(2).cached < 32  # of four blocks the merge took three, known ones too


@pytest.mark.parametrize("kv_tokens", [32, 33, 40, 47])
def test_a_cache_of_few_positions_is_counted_in_whole_blocks(
    runner: Runner, shape: ModelShape, tmp_path: Path, kv_tokens: int
) -> None:
    """The probes take what there is, and nobody is promised positions that no block has."""
    engine = InProcess(runner, 2, kv_tokens=kv_tokens)
    assert engine.engine.ready(MAX_RANK).kv_tokens == 32
    engine.say(merge(image(tmp_path, shape, "a", adapter(shape, 1))))
    assert last(engine, Merged)


def test_an_image_that_was_on_its_way_to_a_slot_is_there(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    load = image(tmp_path, shape, "x", adapter(shape, 1, strength=0.2))
    engine = InProcess(runner, 2).say(load, merge(load)).run()
    assert [type(event) for event in engine.events] == [SlotLoaded, Merged]


def test_a_bad_image_is_refused(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    load = image(tmp_path, shape, "x", adapter(shape, 1))
    engine = InProcess(runner, 2).say(Merge(content_id("y"), load.path))
    event = last(engine, MergeFailed)
    assert isinstance(event, MergeFailed)
    assert "holds content" in event.reason
    engine.say(Merge(content_id("y"), str(tmp_path / "none")))
    assert not any(isinstance(event, SlotFailed | Merged) for event in engine.events)
    engine.say(start(1, PROMPT)).run()
    assert engine.finished(1).reason is FinishReason.LENGTH


def spoilt(shape: ModelShape, part: float) -> tuple[Tensors, Tensors]:
    """An adapter, and the same with one value of one matrix changed by this part of itself."""
    sound = adapter(shape, 1, strength=0.2)
    wrong = {place: (a.copy(), b.copy(), factor) for place, (a, b, factor) in sound.items()}
    wrong[1, "o"] = (wrong[1, "o"][0], wrong[1, "o"][1] * (1 + part), 1.5)
    return sound, wrong


def test_logits_beyond_the_tolerance_are_refused_and_nothing_has_changed(
    computing: Operations, tiny: Path, shape: ModelShape, tmp_path: Path
) -> None:
    """The slot has one adapter, the image that is folded another one of the same name."""
    sound, wrong = (image(tmp_path / str(at), shape, "x", each) for at, each in _folders(tmp_path, spoilt(shape, 0.01)))
    runner = TorchRunner(tiny, "h", computing, {MAX_RANK: 2}, KV_TOKENS)
    engine = InProcess(runner, 2)
    base, before = logits(runner), weights(runner)
    event = last(engine.say(sound).run().say(merge(wrong)), MergeFailed)
    assert isinstance(event, MergeFailed)
    assert "differ by" in event.reason
    assert same(weights(runner), before)
    assert torch.equal(logits(runner), base)
    engine.say(start(1, PROMPT), start(2, PROMPT, "x")).run()
    assert {engine.finished(seq).reason for seq in (1, 2)} == {FinishReason.LENGTH}


def _folders(folder: Path, tensors: Sequence[Tensors]) -> Iterator[tuple[int, Tensors]]:
    for at, each in enumerate(tensors):
        (folder / str(at)).mkdir()
        yield at, each


def test_an_adapter_that_is_not_finite_is_refused(
    native: NativeOperations, tiny: Path, shape: ModelShape, tmp_path: Path
) -> None:
    runner = TorchRunner(tiny, "h", native, {MAX_RANK: 2}, KV_TOKENS)
    broken = adapter(shape, 3)
    broken[1, "down"][0][:] = float("nan")
    base, before = logits(runner), weights(runner)
    engine = InProcess(runner, 2).say(merge(image(tmp_path, shape, "broken", broken)))
    assert isinstance(engine.events[-1], MergeFailed)
    assert same(weights(runner), before)
    assert torch.equal(logits(runner), base)


@pytest.mark.parametrize("after", ["start", "merge"])
def test_a_base_that_changed_on_the_disk_is_not_taken_for_the_base(
    native: NativeOperations, shape: ModelShape, tmp_path: Path, after: str
) -> None:
    """The engine ends; were it to go on, it would serve nothing."""
    folder = save_tiny(tmp_path / "model")
    runner = TorchRunner(folder, "h", native, {MAX_RANK: 2}, KV_TOKENS)
    engine = InProcess(runner, 2)
    load = image(tmp_path, shape, "x", adapter(shape, 1, strength=0.2))
    if after == "merge":
        assert isinstance(engine.say(merge(load)).events[-1], Merged)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] += 1e-6
    path.unlink()  # not over the old one, which is mapped
    save_file(tensors, path)
    with pytest.raises(BaseChanged, match=r"layers\.1\.mlp\.up_proj"):
        engine.say(Unmerge() if after == "merge" else merge(load))
    engine.say(start(1, PROMPT, "x"), start(2, PROMPT)).run()
    assert {engine.finished(seq).reason for seq in (1, 2)} == {FinishReason.ERROR}


def test_w_that_holds_something_else_stops_the_row(runner: Runner, shape: ModelShape, tmp_path: Path) -> None:
    """A fault in the accounting: W is taken for the base's, for another content's, or for another epoch's."""
    x, y = (image(tmp_path, shape, name, adapter(shape, seed, strength=0.2)) for seed, name in enumerate("xy"))
    engine = InProcess(runner, 2).say(y).run().say(merge(x))
    really = engine.slots.merged
    for seq, (believed, named) in enumerate(
        [
            (NO_ADAPTER, ""),
            (NO_ADAPTER, "y"),  # in its slot, on weights that have x in them
            (Lease(0, really.epoch, content_id("y")), "y"),
            (Lease(0, really.epoch + 1, content_id("x")), "x"),
            (really, "x"),
        ],
        1,
    ):
        engine.slots._weights.content_id, engine.slots._weights.epoch = believed.content_id, believed.epoch
        engine.say(start(seq, PROMPT, named)).run()
    reasons = [engine.finished(seq).reason for seq in range(1, 6)]
    assert reasons == [FinishReason.ERROR] * 4 + [FinishReason.LENGTH]
    assert all("slot mismatch" in engine.finished(seq).detail for seq in range(1, 5))
    engine.say(Unmerge())
    engine.slots._weights.content_id, engine.slots._weights.epoch = really.content_id, really.epoch
    engine.say(start(6, PROMPT, "x")).run()
    assert "slot mismatch" in engine.finished(6).detail


def test_it_lives_while_it_merges(native: NativeOperations, tiny: Path, shape: ModelShape, tmp_path: Path) -> None:
    """A worker that hears nothing takes its engine for hung."""
    runner = TorchRunner(tiny, "h", native, {MAX_RANK: 2}, KV_TOKENS)
    engine, seconds = InProcess(runner, 2), iter(range(10_000))
    slow = Engine(engine.scheduler, engine.slots, runner, engine.events.append, lambda: next(seconds) / 4)
    slow.handle(merge(image(tmp_path, shape, "x", adapter(shape, 1, strength=0.2))))
    merging = [type(event) for event in engine.events]
    assert (merging[0], merging[-1]) == (SlotLoaded, Merged)
    assert merging.count(Step) > 3
    slow.handle(Unmerge())
    assert [type(event) for event in engine.events].count(Step) > merging.count(Step)


def test_slots_know_what_the_weights_stand_for() -> None:
    slots = Slots(2)
    placed = slots.place("y", lambda _: False)
    assert placed is not None
    assert (slots.merged, slots.holds("y"), slots.holds("")) == (NO_ADAPTER, True, False)
    assert slots.merge("x") == slots.merged == Lease(0, 1, "x")
    assert (slots.holds("x"), slots.holds("y")) == (True, False)
    with pytest.raises(KeyError):
        slots.lease(1, "y")
    assert slots.lease(1, "x") == slots.merged
    for refused in (lambda: slots.merge("y"), slots.unmerge):
        with pytest.raises(Exception, match="leases are open"):
            refused()
    slots.release(1)
    slots.unmerge()
    assert (slots.merged, slots.contents()) == (NO_ADAPTER, {"y": (placed.slot, placed.epoch)})
    assert slots.merge("x").epoch == 2
