"""A sequence's tokens and logits depend, to the bit, on itself alone, not on company, cuts, restarts or slots."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from schemas.engine import LoadSlot, SlotLoaded
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import KV_TOKENS, MAX_RANK, InProcess, adapter, content_id, image, start
from workers.engine.model import LlamaModel
from workers.engine.native import NativeOperations
from workers.engine.operations import Batch, Operations
from workers.engine.reference import ReferenceOperations
from workers.engine.runner import Stamps
from workers.engine.scheduler import Outcome, Row
from workers.engine.slots import Lease
from workers.engine.torch_runner import NotReproducible, TorchRunner

ADAPTERS = [f"a{i}" for i in range(11)]
ROWS = 32


class Watched(TorchRunner):
    """Keeps the logits of every sampled position."""

    def __init__(self, folder: Path, operations: Operations, slots: int) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        super().__init__(folder, "h", operations, {MAX_RANK: slots}, KV_TOKENS)

    def _sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Outcome]:
        sampled = [(row.sequence.seq, row.sequence.length) for row in rows]
        self.logits.update(zip(sampled, logits.clone(), strict=True))
        return super()._sample(logits, rows)


def prompt(seq: int) -> list[int]:
    return [(seq * 37 + i * i * 5 + 3) % 331 for i in range(5 + 9 * seq % 61)]


def sampling(seq: int) -> Sampling:
    return Sampling(seed=seq) if seq % 2 else Sampling(seed=seq, temperature=0.9, top_p=0.9)


def name(seq: int) -> str:
    """Every twelfth is the base, the others share eleven adapters."""
    return ["", *ADAPTERS][seq % 12]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, shape: ModelShape) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for seed, adapter_name in enumerate(ADAPTERS):
        image(folder, shape, adapter_name, adapter(shape, seed, rank=1 + seed % MAX_RANK))
    return folder


def loads(images: Path, names: Iterable[str]) -> list[LoadSlot]:
    return [LoadSlot(content_id(each), str(images / each)) for each in names]


def served(
    runner: Watched, images: Path, seqs: Iterable[int], adapters: Iterable[str] = ADAPTERS, chunk: int = 128
) -> InProcess:
    """The sequences together in one engine, every named adapter in a slot."""
    engine = InProcess(runner, runner.stacks.pools[0].slots, prompt_tokens=chunk).say(*loads(images, adapters))
    return engine.say(*(start(seq, prompt(seq), name(seq), sampling=sampling(seq)) for seq in seqs)).run()


@pytest.mark.parametrize("make", ["native", "reference"])
def test_alone_or_among_31_others_in_any_cut(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape, make: str
) -> None:
    operations: Operations = native if make == "native" else ReferenceOperations()
    together = Watched(tiny, operations, len(ADAPTERS))
    engine = served(together, images, range(ROWS))
    assert max(step.rows for step in engine.steps()) == ROWS
    assert max(step.adapters for step in engine.steps()) == len(ADAPTERS)
    alone = Watched(tiny, operations, 1)
    for seq, chunk in [(0, 128), (1, 7), (2, 1), (5, 16), (11, 3), (24, 5), (31, 128)][:: 1 if make == "native" else 3]:
        single = served(alone, images, [seq], [name(seq)] if name(seq) else [], chunk)
        assert single.tokens(seq) == engine.tokens(seq)
        for position in range(12):
            assert torch.equal(alone.logits[seq, position], together.logits[seq, position])


def test_prefilled_again_elsewhere_it_goes_on_as_it_would_have(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape
) -> None:
    first, second = Watched(tiny, native, 11), Watched(tiny, native, 11)
    engine = served(first, images, range(ROWS), chunk=40)
    other = InProcess(second, 11, prompt_tokens=23)
    other.say(*loads(images, reversed(ADAPTERS)))  # into other slots than there
    for seq in range(ROWS):
        generated = engine.tokens(seq)[: 1 + seq % 11]
        other.say(start(seq, prompt(seq), name(seq), generated=generated, sampling=sampling(seq)))
    other.run()
    for seq in range(ROWS):
        assert other.tokens(seq) == engine.tokens(seq)[1 + seq % 11 :]
        for position in range(1 + seq % 11, 12):
            assert torch.equal(first.logits[seq, position], second.logits[seq, position])


def test_preempted_it_goes_on_as_it_would_have(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape
) -> None:
    roomy = served(Watched(tiny, native, 11), images, range(8))
    runner = Watched(tiny, native, 11)
    tight = InProcess(runner, 11, kv_tokens=6 * 16)
    tight.say(*loads(images, ADAPTERS))
    tight.say(*(start(seq, prompt(seq), name(seq), sampling=sampling(seq)) for seq in range(8))).run()
    assert sum(len(step.joined) for step in tight.steps()) > 8
    assert all(tight.tokens(seq) == roomy.tokens(seq) for seq in range(8))


def test_base_rows_have_the_bits_of_a_model_without_slots(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape
) -> None:
    mixed = Watched(tiny, native, 11)
    served(mixed, images, range(ROWS))
    plain = Watched(tiny, native, 0)
    served(plain, images, [0, 12, 24], [])
    for seq in (0, 12, 24):
        for position in range(12):
            assert torch.equal(plain.logits[seq, position], mixed.logits[seq, position])


def test_a_slot_that_is_filled_again_holds_nothing_of_what_it_held(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape
) -> None:
    """One slot, whole and partial adapters that come and go: each has the tokens it has with a slot of its own."""
    engine = served(Watched(tiny, native, 11), images, range(ROWS))
    narrow = InProcess(Watched(tiny, native, 1), 1)
    half = {key: value for key, value in adapter(shape, 99).items() if key[0] == 0}
    for seq in (8, 1, 7, 2):
        narrow.say(*loads(images, [name(seq)]))
        narrow.say(start(seq, prompt(seq), name(seq), sampling=sampling(seq))).run()
        narrow.say(image(images, shape, "half", half), start(100 + seq, prompt(seq), "half")).run()
        fresh = InProcess(Watched(tiny, native, 1), 1).say(image(images, shape, "half", half))
        assert narrow.tokens(seq) == engine.tokens(seq)
        assert narrow.tokens(100 + seq) == fresh.say(start(100 + seq, prompt(seq), "half")).run().tokens(100 + seq)
    assert max(event.epoch for event in narrow.events if isinstance(event, SlotLoaded)) == 8


class Misindexed(LlamaModel):
    """The fault that must never be: rows compute with the neighbouring slot."""

    def forward(self, batch: Batch) -> Tensor:
        wrong = torch.where(batch.slots > 0, batch.slots % self._stacks.pools[0].slots + 1, 0).to(torch.int32)
        return super().forward(Batch(**{**vars(batch), "slots": wrong}))


def test_a_wrong_slot_index_is_seen_by_these_tests(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served(Watched(tiny, native, 11), images, range(ROWS))
    monkeypatch.setattr("workers.engine.torch_runner.LlamaModel", Misindexed)
    wrong = served(Watched(tiny, native, 11), images, range(ROWS))
    for seq in range(ROWS):
        assert (wrong.tokens(seq) == engine.tokens(seq)) == (name(seq) == "")


def test_a_row_whose_slot_holds_another_filling_ends_with_an_error(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Stamps.write
    monkeypatch.setattr(
        Stamps, "write", lambda self, f: write(self, Lease(f.slot, f.epoch + (f.slot == 2), f.content_id))
    )
    engine = served(Watched(tiny, native, 3), images, [0, 1, 2, 3], ADAPTERS[:3])
    reasons = [engine.finished(seq).reason for seq in range(4)]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert "slot mismatch" in engine.finished(2).detail
    assert engine.slots.leased == 0


def test_logits_that_are_not_finite_end_their_sequence_alone(
    native: NativeOperations, tiny: Path, images: Path, shape: ModelShape
) -> None:
    broken = adapter(shape, 3)
    broken[1, "down"][0][:] = float("nan")
    engine = InProcess(Watched(tiny, native, 2), 2, kv_tokens=256)
    engine.say(image(images, shape, "broken", broken), start(1, prompt(1), "broken"), start(2, prompt(2))).run()
    assert (engine.finished(1).reason, engine.finished(1).detail) == (FinishReason.ERROR, "a logit is not finite")
    assert engine.finished(2).reason is FinishReason.LENGTH
    # Its KV blocks are used again without being cleaned: what lies beyond a sequence's end is never read.
    fresh = InProcess(Watched(tiny, native, 2), 2).say(start(3, prompt(3))).run()
    engine.say(*(start(seq, prompt(3)) for seq in (3, 4, 5))).run()
    assert engine.tokens(3) == engine.tokens(4) == engine.tokens(5) == fresh.tokens(3)


def test_a_machine_whose_bits_depend_on_company_is_refused(native: NativeOperations, tiny: Path) -> None:
    class Depends(ReferenceOperations):
        def linear(self, weight: object, x: Tensor) -> Tensor:
            return super().linear(weight, x) + 1e-6 * len(x)  # type: ignore[arg-type]

    with pytest.raises(NotReproducible):
        TorchRunner(tiny, "h", Depends(), {MAX_RANK: 1}, 256)


def test_the_stack_is_never_rebuilt(native: NativeOperations, tiny: Path, images: Path, shape: ModelShape) -> None:
    runner = Watched(tiny, native, 11)
    before = runner.stacks.pools[0].data.data_ptr()
    served(runner, images, range(ROWS))
    assert runner.stacks.pools[0].data.data_ptr() == before
