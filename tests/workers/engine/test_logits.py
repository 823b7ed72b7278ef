"""Penalties, bias and log-probabilities: their arithmetic against transformers and torch, and in a running engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from schemas.engine import Token
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from schemas.tokens import Logprobs
from tests.workers.engine.tiny import KV_TOKENS, MAX_RANK, InProcess, start
from workers.engine.logits import Floats, adjust, adjusts, logprobs
from workers.engine.native import NativeOperations
from workers.engine.torch_runner import TorchRunner

PROMPT = [5, 9, 200, 9]


def row(seed: int = 0, vocab: int = 331) -> Floats:
    return np.random.default_rng(seed).standard_normal(vocab).astype(np.float32)


def adjusted(logits: Floats, sampling: Sampling, prompt: list[int], output: list[int]) -> Floats:
    changed = logits.copy()
    adjust(changed, sampling, prompt, output)
    return changed


def test_a_plain_request_changes_nothing() -> None:
    plain = Sampling(seed=1, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, top_logprobs=3)
    assert not adjusts(plain)
    assert (adjusted(row(), plain, [1, 2], [3]) == row()).all()


def test_repetition_is_that_of_transformers() -> None:
    prompt, output = [4, 4, 17], [20, 4]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), torch.from_numpy(row()[None]))[0]
    np.testing.assert_allclose(adjusted(row(), Sampling(1, repetition_penalty=1.3), prompt, output), theirs, rtol=1e-6)


def test_frequency_and_presence_count_the_output_alone() -> None:
    sampling = Sampling(1, frequency_penalty=0.5, presence_penalty=-0.25)
    changed = adjusted(row(), sampling, [7, 8], [8, 9, 9]) - row()
    assert np.flatnonzero(changed).tolist() == [8, 9]
    np.testing.assert_allclose(changed[[8, 9]], [-0.25, -0.75], atol=1e-6)


def test_a_bias_is_added_first() -> None:
    sampling = Sampling(1, logit_bias={3: 2.0, 330: -100.0}, repetition_penalty=2.0)
    logits = np.zeros(331, np.float32)
    assert adjusted(logits, sampling, [3], [])[[3, 330, 0]].tolist() == [1.0, -100.0, 0.0]


def test_logprobs_are_a_log_softmax_with_the_lower_id_first() -> None:
    logits = row()
    logits[[40, 41, 42]] = 9.0
    found = logprobs(logits, 7, 2)
    right = torch.from_numpy(logits).double().log_softmax(-1)
    assert found.own == pytest.approx(float(right[7]), abs=1e-9)
    assert [i for i, _ in found.likeliest] == [40, 41]
    assert [v for _, v in found.likeliest] == pytest.approx(right[[40, 41]].tolist(), abs=1e-9)
    assert logprobs(logits, 7, 0).likeliest == []
    assert len(logprobs(logits, 7, 1000).likeliest) == 331


@pytest.fixture(scope="module")
def runner(tiny: Path, native: NativeOperations) -> TorchRunner:
    return TorchRunner(tiny, "h", native, {MAX_RANK: 1}, KV_TOKENS)


def tokens_of(engine: InProcess, seq: int) -> list[Token]:
    return [token for step in engine.steps() for token in step.tokens if token.seq == seq]


def test_requests_of_every_kind_share_a_batch(runner: TorchRunner) -> None:
    """A bias names the token; a penalty forbids repeats; logprobs come where they were asked, and with them alone."""
    asked = [
        Sampling(1),
        Sampling(1, logit_bias={77: 100.0}),
        Sampling(1, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=dict.fromkeys(range(10, 30), 90.0)),
        Sampling(1, top_logprobs=3),
        Sampling(1, temperature=1.5, top_k=1),
    ]
    engine = InProcess(runner, 1).say(*(start(n, PROMPT, sampling=sampling) for n, sampling in enumerate(asked))).run()
    assert engine.tokens(1) == [77] * 12
    assert len(set(engine.tokens(2))) == 12
    assert engine.tokens(3) == engine.tokens(4) == engine.tokens(0)
    for token in tokens_of(engine, 3):
        assert isinstance(token.logprobs, Logprobs)
        assert token.logprobs.likeliest[0] == (token.id, token.logprobs.own)
        assert len(token.logprobs.likeliest) == 3
    assert all(token.logprobs is None for seq in (0, 1, 2, 4) for token in tokens_of(engine, seq))


def test_a_request_goes_on_as_it_would_have(runner: TorchRunner) -> None:
    """Penalties count what earlier attempts said: a re-drive continues the very same text."""
    sampling = Sampling(3, temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.2, top_k=40, min_p=0.01)
    whole = InProcess(runner, 1).say(start(0, PROMPT, sampling=sampling)).run().tokens(0)
    again = InProcess(runner, 1).say(start(0, PROMPT, sampling=sampling, generated=whole[:5])).run().tokens(0)
    assert again == whole[5:]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(1, top_k=-1), "top_k"),
        (Sampling(1, top_k=1 << 31), "top_k"),
        (Sampling(1, min_p=1.5), "min_p"),
        (Sampling(1, repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(1, repetition_penalty=float("nan")), "repetition_penalty"),
        (Sampling(1, presence_penalty=2.5), "presence_penalty"),
        (Sampling(1, frequency_penalty=float("inf")), "frequency_penalty"),
        (Sampling(1, logit_bias={331: 1.0}), "logit_bias"),
        (Sampling(1, logit_bias={3: 101.0}), "logit_bias"),
        (Sampling(1, top_logprobs=21), "top_logprobs"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(runner: TorchRunner, sampling: Sampling, field: str) -> None:
    finished = InProcess(runner, 1).say(start(0, PROMPT, sampling=sampling)).run().finished(0)
    assert finished.reason is FinishReason.ERROR
    assert finished.detail.startswith(f"{field}: ")
