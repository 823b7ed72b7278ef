"""One sequence in the engine: its tokens, how far they are computed, and where it may end. Pure."""

import math

from schemas.engine import StartSequence
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from streams.formats.schema import MAX_SCHEMA_BYTES
from workers.engine.fairness import GREATEST_WEIGHT, LEAST_WEIGHT
from workers.engine.prefix import Space
from workers.engine.slots import NO_ADAPTER, Lease

MOST_LOGPROBS = 20  # as many alternatives as OpenAI's API gives


class Sequence:
    """`tokens` is prompt + output. `computed` of them have their keys and values stored; running ones have a lease.

    While `computed` < `known` the sequence reads tokens it already has (prefill); after that each step computes the one
    newest token and samples the next (decode). `known` moves up when a preempted sequence starts over. `age` is its
    number in order of arrival. `given` tokens came with it; `paid` of them are charged to its customer or came from the
    prefix cache, as did `cached` tokens of its prompt before it was ever preempted.
    """

    def __init__(self, start: StartSequence, age: int, context_length: int, merged: bool = False) -> None:
        self.seq = start.seq
        self.age = age
        self.customer = start.customer
        self.weight = start.weight
        self.content_id = start.content_id
        self.merged = merged  # for its whole life: the weights change only while there are no sequences
        self.sampling = start.sampling
        self.stop_ids = frozenset(start.stop_ids)
        self.prompt_length = len(start.prompt)
        self.tokens = start.prompt + start.generated
        self.limit = min(self.prompt_length + start.max_tokens, context_length)
        self.given = self.known = len(self.tokens)
        self.computed = self.paid = self.cached = 0
        self.restarted = False
        self.lease: Lease = NO_ADAPTER

    @property
    def length(self) -> int:
        """The output's length so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def in_flight(self) -> int:
        """Tokens still to be computed: known ones not yet read, and output still allowed."""
        return max(0, self.known - self.computed) + max(0, self.limit - len(self.tokens))

    @property
    def left(self) -> int:
        """Tokens that are there and not computed."""
        return len(self.tokens) - self.computed

    @property
    def reading(self) -> bool:
        return self.computed < self.known

    @property
    def unpaid(self) -> int:
        return self.given - self.paid

    def space(self) -> Space:
        """Whose prefixes it may take over and adds to."""
        return Space(self.customer, self.content_id, self.merged)

    def skip(self, computed: int) -> None:
        """Its tokens up to `computed` came from the prefix cache and cost nothing."""
        if not self.restarted:
            self.cached += min(computed, self.prompt_length) - min(self.computed, self.prompt_length)
        self.computed, self.paid = computed, max(self.paid, min(computed, self.given))

    def pay(self, computed: int) -> int:
        """Tokens that came with it, among its first `computed`, which were not paid; they are from here on."""
        due = max(0, min(computed, self.given) - self.paid)
        self.paid += due
        return due

    def ending(self) -> FinishReason | None:
        """Whether the tokens so far end the sequence."""
        if self.length and self.tokens[-1] in self.stop_ids:
            return FinishReason.STOP
        if len(self.tokens) >= self.limit:
            return FinishReason.LENGTH
        return None

    def restart(self) -> None:
        """Forgets what was computed, not the tokens: everything is read again."""
        self.restarted = True
        self.known, self.computed, self.lease = len(self.tokens), 0, NO_ADAPTER


def fault(start: StartSequence, vocab_size: int, kv_tokens: int, context_length: int) -> str:
    """Why this sequence can never run here; empty if it can."""
    if not start.prompt:
        return "prompt: it is empty; at least one token is needed"
    if not all(0 <= token < vocab_size for token in start.prompt + start.generated):
        return f"prompt: a token id is outside 0..{vocab_size - 1}"
    known, limit = len(start.prompt) + len(start.generated), len(start.prompt) + start.max_tokens
    if len(start.prompt) >= context_length:
        return f"prompt: {len(start.prompt)} tokens do not fit the context of {context_length}"
    if max(known, min(limit, context_length)) > kv_tokens:
        return f"max_tokens: {limit} tokens in all, the KV cache holds {kv_tokens}; ask for fewer"
    if detail := _sampling_fault(start.sampling, vocab_size):
        return detail
    if start.sampling.json_schema and not start.stop_ids:
        return "json_schema: an output that is held to one needs stop_ids to end with"
    if not LEAST_WEIGHT <= start.weight <= GREATEST_WEIGHT:
        return f"weight: {start.weight} is not in [{LEAST_WEIGHT}, {GREATEST_WEIGHT}]"
    return ""


def _sampling_fault(sampling: Sampling, vocab_size: int) -> str:
    """Why no token can be drawn like this; empty if one can."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature: {sampling.temperature} is not a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p: {sampling.top_p} is not in (0, 1]"
    if not 0 <= sampling.top_k < 1 << 31:
        return f"top_k: {sampling.top_k} is not in 0..{(1 << 31) - 1}"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p: {sampling.min_p} is not in [0, 1]"
    if not 0.01 <= sampling.repetition_penalty <= 100:
        return f"repetition_penalty: {sampling.repetition_penalty} is not in [0.01, 100]"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            return f"{name}: {getattr(sampling, name)} is not in [-2, 2]"
    for token, bias in sampling.logit_bias.items():
        if not (0 <= token < vocab_size and -100 <= bias <= 100):
            return f"logit_bias: {token}: {bias} is not an id in 0..{vocab_size - 1} with a bias in [-100, 100]"
    if len(sampling.json_schema) > MAX_SCHEMA_BYTES:
        return f"json_schema: {len(sampling.json_schema)} characters are more than {MAX_SCHEMA_BYTES}"
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MOST_LOGPROBS:
        return f"top_logprobs: {sampling.top_logprobs} is not in 0..{MOST_LOGPROBS}"
    return ""
