"""The prefix cache under the engine: who may take over what, and that a row's bits do not depend on it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from schemas.engine import LoadSlot, StartSequence, UnloadSlot
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import KV_TOKENS, MAX_RANK, InProcess, adapter, content_id, image, start
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.native import NativeOperations
from workers.engine.scheduler import Outcome, Row
from workers.engine.torch_runner import TorchRunner

ADAPTERS = ("a0", "a1", "a2")
SYSTEM = [(i * i * 7 + 3) % 331 for i in range(3 * BLOCK_TOKENS + 5)]


class Watched(TorchRunner):
    """Keeps the logits of every sampled position."""

    def __init__(self, folder: Path, native: NativeOperations) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        super().__init__(folder, "h", native, {MAX_RANK: len(ADAPTERS)}, KV_TOKENS)

    def _sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Outcome]:
        sampled = [(row.sequence.seq, row.sequence.length) for row in rows]
        self.logits.update(zip(sampled, logits.clone(), strict=True))
        return super()._sample(logits, rows)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory, shape: ModelShape) -> list[LoadSlot]:
    folder = tmp_path_factory.mktemp("images")
    return [image(folder, shape, name, adapter(shape, seed)) for seed, name in enumerate(ADAPTERS)]


@pytest.fixture(scope="module")
def runner(tiny: Path, native: NativeOperations) -> Watched:
    return Watched(tiny, native)


def asked(seq: int) -> StartSequence:
    """Every sequence begins with the same words; four of them also share its adapter."""
    name = ["", *ADAPTERS][seq % 4]
    prompt = [*SYSTEM, *((seq * 37 + i * 5) % 331 for i in range(1 + seq % 20))]
    return start(seq, prompt, name, sampling=Sampling(seed=seq, temperature=0.8 * (seq % 2), top_p=0.9))


def cold(runner: Watched, loads: list[LoadSlot], command: StartSequence) -> tuple[list[int], list[Tensor]]:
    """What the sequence gets alone in an engine that has nothing cached, and its logits."""
    engine = InProcess(runner, len(ADAPTERS)).say(*loads, command).run()
    assert engine.finished(command.seq).cached == 0
    return engine.tokens(command.seq), [runner.logits[command.seq, at] for at in range(command.max_tokens)]


def same_bits(runner: Watched, expected: tuple[list[int], list[Tensor]], engine: InProcess, seq: int) -> None:
    tokens, logits = expected
    assert engine.tokens(seq) == tokens
    assert all(torch.equal(runner.logits[seq, at], logits[at]) for at in range(len(tokens)))


def test_bits_do_not_depend_on_the_prefix_cache(runner: Watched, loads: list[LoadSlot]) -> None:
    alone = {seq: cold(runner, loads, asked(seq)) for seq in range(16)}
    engine = InProcess(runner, len(ADAPTERS), prompt_tokens=50).say(*loads)
    for first in range(0, 16, 4):  # the first four find nothing, later ones what those left
        engine.say(*(asked(seq) for seq in range(first, first + 4))).run()
    for seq in range(16):
        assert engine.finished(seq).cached == (0 if seq < 4 else 3 * BLOCK_TOKENS)
        same_bits(runner, alone[seq], engine, seq)


def test_at_once_a_shared_prefix_is_computed_once(runner: Watched, loads: list[LoadSlot]) -> None:
    seqs = [1, 5, 9, 13]
    alone = {seq: cold(runner, loads, asked(seq)) for seq in seqs}
    engine = InProcess(runner, len(ADAPTERS), prompt_tokens=BLOCK_TOKENS).say(*loads)
    engine.say(*(asked(seq) for seq in seqs)).run()
    assert [engine.finished(seq).cached for seq in seqs] == [0, *[3 * BLOCK_TOKENS] * 3]
    for seq in seqs:
        same_bits(runner, alone[seq], engine, seq)


def test_bits_do_not_depend_on_what_a_preempted_sequence_finds_again(runner: Watched, loads: list[LoadSlot]) -> None:
    seqs = range(8)
    alone = {seq: cold(runner, loads, asked(seq)) for seq in seqs}
    tight = InProcess(runner, len(ADAPTERS), kv_tokens=9 * BLOCK_TOKENS).say(*loads)
    tight.say(*(asked(seq) for seq in seqs)).run()
    assert sum(len(step.joined) for step in tight.steps()) > len(seqs)
    for seq in seqs:
        same_bits(runner, alone[seq], tight, seq)


def test_a_conversation_goes_on_from_what_decoding_left(runner: Watched, loads: list[LoadSlot]) -> None:
    """Blocks that were filled token by token serve a prompt that would have been read whole."""
    engine = InProcess(runner, len(ADAPTERS)).say(*loads)
    first = start(1, SYSTEM, "a1", max_tokens=40)
    engine.say(first).run()
    second = start(2, [*SYSTEM, *engine.tokens(1), 5, 6, 7], "a1")
    engine.say(second).run()
    assert engine.finished(2).cached == (len(SYSTEM) + 39) // BLOCK_TOKENS * BLOCK_TOKENS  # its last was not computed
    warm = {at: runner.logits[2, at] for at in range(12)}
    tokens, logits = cold(runner, loads, second)
    assert tokens == engine.tokens(2)
    assert all(torch.equal(warm[at], logits[at]) for at in range(12))


def test_other_adapters_customers_and_the_base_find_nothing_of_it(runner: Watched, loads: list[LoadSlot]) -> None:
    """The same prompt under two adapters, the base and another customer, each against an engine of its own."""
    engine = InProcess(runner, len(ADAPTERS)).say(*loads)
    asks = [start(seq, SYSTEM, name) for seq, name in enumerate(["a0", "a1", "", "a2"])]
    asks += [msgspec.structs.replace(ask, seq=ask.seq + 4, customer="another") for ask in asks]
    for ask in asks:
        engine.say(ask).run()
        assert engine.finished(ask.seq).cached == 0
    again = [msgspec.structs.replace(ask, seq=ask.seq + 8) for ask in asks]
    engine.say(*again).run()
    assert {engine.finished(ask.seq).cached for ask in again} == {3 * BLOCK_TOKENS}
    warm = dict(runner.logits)
    for ask in asks:
        tokens, logits = cold(runner, loads, ask)
        assert tokens == engine.tokens(ask.seq) == engine.tokens(ask.seq + 8)
        assert all(torch.equal(warm[ask.seq + 8, at], logits[at]) for at in range(12))
    assert len({tuple(engine.tokens(ask.seq)) for ask in asks}) == 4  # each adapter has its own words


def test_an_adapter_that_leaves_and_returns_finds_its_own(runner: Watched, loads: list[LoadSlot]) -> None:
    """Content ids name bytes, so what was computed with them stays right while they are in no slot, or in another."""
    engine = InProcess(runner, len(ADAPTERS)).say(loads[0], start(1, SYSTEM, "a0")).run()
    engine.say(UnloadSlot(content_id("a0")), loads[1], loads[0], start(2, SYSTEM, "a0")).run()
    assert (engine.finished(1).slot, engine.finished(2).slot) == (1, 2)
    assert engine.finished(2).cached == 3 * BLOCK_TOKENS
    assert engine.tokens(2) == engine.tokens(1)


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(runner: Watched, loads: list[LoadSlot]) -> None:
    prompt = SYSTEM[: 2 * BLOCK_TOKENS]
    engine = InProcess(runner, len(ADAPTERS)).say(start(1, prompt)).run()
    engine.say(start(2, prompt)).run()
    assert engine.finished(2).cached == BLOCK_TOKENS
    assert engine.tokens(2) == engine.tokens(1)


def test_what_a_failed_row_computed_is_not_taken_over(
    runner: Watched, shape: ModelShape, tmp_path: Path, loads: list[LoadSlot]
) -> None:
    broken = adapter(shape, 3)
    broken[1, "down"][0][:] = float("nan")
    engine = InProcess(runner, len(ADAPTERS)).say(image(tmp_path, shape, "broken", broken))
    for seq in (1, 2):
        engine.say(start(seq, SYSTEM, "broken")).run()
        assert (engine.finished(seq).reason, engine.finished(seq).cached) == (FinishReason.ERROR, 0)


def test_a_redriven_sequence_reports_prompt_tokens_only(runner: Watched, loads: list[LoadSlot]) -> None:
    engine = InProcess(runner, len(ADAPTERS)).say(start(1, SYSTEM, max_tokens=40)).run()
    engine.say(start(2, SYSTEM, generated=engine.tokens(1)[:30], max_tokens=40)).run()
    assert engine.finished(2).cached == len(SYSTEM)
    assert engine.tokens(2) == engine.tokens(1)[30:]
