"""The engine's double: same scheduler, slots, KV accounting and protocol, no torch.

The next token is a fixed hash of (content id, prompt, output position), so that any test can compute the right answer
without an engine. It is never one of the first RESERVED_IDS of the vocabulary, where tokenizers keep their special
tokens: a sequence ends early only if its stop ids name a token that `simulated_token` gives.
"""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import log
from pathlib import Path

from schemas.tokens import Logprobs
from streams.adapters.shape import ModelShape
from workers.engine.formats import Formats
from workers.engine.runner import Fold, Model, Opened, Stamps
from workers.engine.scheduler import Failure, Outcome, Row, Scored
from workers.engine.sequence import Sequence as Waiting
from workers.engine.slots import NO_ADAPTER, Lease
from workers.slot_image import check_header

RESERVED_IDS = 64
NUMERIC_CLASS = "simulated"


def simulated_token(content_id: str, prompt: Sequence[int], position: int, vocab_size: int) -> int:
    """The token at output position `position`. `content_id` is empty for the base model."""
    digest = blake2b(
        f"{content_id}|{_prompt_digest(tuple(prompt))}|{position}".encode(), digest_size=8, usedforsecurity=False
    )
    return RESERVED_IDS + int.from_bytes(digest.digest(), "little") % (vocab_size - RESERVED_IDS)


def simulated_logprobs(token: int, most: int, vocab_size: int) -> Logprobs:
    """The token itself at probability 1/2, the ids after it at 1/4, 1/8, ..."""
    likeliest = [((token + rank) % vocab_size, -(rank + 1) * log(2)) for rank in range(most)]
    return Logprobs(-log(2), likeliest)


@lru_cache(maxsize=4096)
def _prompt_digest(prompt: tuple[int, ...]) -> str:
    return blake2b(" ".join(map(str, prompt)).encode(), digest_size=16, usedforsecurity=False).hexdigest()


class SimulatedRunner:
    """A step takes `step_ms`, a load `load_ms`; an image's header is checked, its payload not read.

    Of a sequence with a format the hash chooses among the ids that may come next. `folder`: whose tokenizer that needs.
    """

    def __init__(
        self,
        shape: ModelShape,
        base_hash: str,
        ranks: Sequence[int],
        step_ms: float,
        load_ms: float,
        folder: Path | None = None,
    ) -> None:
        if shape.vocab <= RESERVED_IDS:
            raise ValueError(f"vocab_size: {shape.vocab} is not above the {RESERVED_IDS} reserved ids")
        self.model = Model(base_hash, NUMERIC_CLASS, shape.context, shape.vocab)
        self._ranks = ranks
        self._step_ms = step_ms
        self._load_ms = load_ms
        self._stamps = Stamps()
        self._formats = Formats(folder, shape.vocab)

    def open(self, content_id: str, path: Path) -> Opened:
        header = check_header(path, content_id, *self._ranks)

        def copy(filling: Lease) -> int:
            _sleep_ms(self._load_ms)
            self._stamps.write(filling)
            return header.payload_bytes

        return Opened(self._ranks.index(header.rank), copy)

    def clear(self, slot: int) -> None:
        self._stamps.erase(slot)

    def merge(
        self, merged: Lease, filling: Lease, path: Path, blocks: Sequence[int], alive: Callable[[], None]
    ) -> Fold:
        check_header(path, merged.content_id, *self._ranks)
        _sleep_ms(self._load_ms)
        self._stamps.write(merged)
        return Fold(f"{NUMERIC_CLASS}/merged-{merged.content_id[:16]}", worst=0.0, tolerance=0.0)

    def unmerge(self, alive: Callable[[], None]) -> None:
        _sleep_ms(self._load_ms)
        self._stamps.write(NO_ADAPTER)

    def ready(self, sequence: Waiting) -> bool:
        return self._formats.ready(sequence)

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        _sleep_ms(self._step_ms)
        return [self._next(row) for row in rows]

    def _next(self, row: Row) -> Outcome:
        if why := self._stamps.mismatch(row):
            return Failure(why)
        if not row.samples:
            return None
        sequence = row.sequence
        prompt = sequence.tokens[: sequence.prompt_length]
        token = simulated_token(sequence.content_id, prompt, sequence.length, self.model.vocab_size)
        if sequence.sampling.json_schema:
            allowed = self._formats.allowed(sequence)
            if isinstance(allowed, Failure):
                return allowed
            ids = allowed.nonzero()[0]
            token = int(ids[token % len(ids)])
        if (most := sequence.sampling.top_logprobs) is None:
            return token
        return Scored(token, simulated_logprobs(token, most, self.model.vocab_size))


def _sleep_ms(duration_ms: float) -> None:
    if duration_ms > 0:
        time.sleep(duration_ms / 1000)
