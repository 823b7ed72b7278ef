"""What a request asks of its logits besides a draw: bias and penalties before it, log-probabilities after it. Pure.

Element by element in float32, so that a row's result depends on its own logits and tokens alone, wherever it is
computed. The order is vLLM's: bias, repetition (CTRL, Keskar et al. 2019), frequency, presence (OpenAI's API).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.requests import Sampling
from schemas.tokens import Logprobs

Floats = npt.NDArray[np.float32]


def adjusts(sampling: Sampling) -> bool:
    """Whether `adjust` would change anything."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def adjust(logits: Floats, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Changes logits [vocab] in place. Repetition counts prompt and output, frequency and presence the output alone."""
    if sampling.logit_bias:
        ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
        logits[ids] += np.fromiter(sampling.logit_bias.values(), np.float32)
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *output], np.int64))
        penalty = np.float32(sampling.repetition_penalty)
        held = logits[seen]
        logits[seen] = np.where(held > 0, held / penalty, held * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        said, counts = np.unique(np.array(output, np.int64), return_counts=True)
        logits[said] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        logits[said] -= np.float32(sampling.presence_penalty)


def logprobs(logits: Floats, drawn: int, most: int) -> Logprobs:
    """Of the model itself, at temperature 1: the drawn id's, and those of the `most` likeliest, the likeliest first.

    `logits` [vocab] as they were before `adjust`; among equals the lower id comes first.
    """
    wide = logits.astype(np.float64)
    top = wide.max()
    norm = top + np.log(np.exp(wide - top).sum())
    likeliest: list[tuple[int, float]] = []
    if most:
        most = min(most, len(wide))
        ids = np.flatnonzero(logits >= np.partition(logits, -most)[-most])
        ids = ids[np.lexsort((ids, -wide[ids]))][:most]
        likeliest = [(int(i), float(wide[i] - norm)) for i in ids]
    return Logprobs(float(wide[drawn] - norm), likeliest)
