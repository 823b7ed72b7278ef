"""What a shared system prompt saves: time to first token with its keys and values computed before, and without.

Each request is a system prompt of 512 tokens, the same for all, and 32 tokens of its own; one at a time. Warm: the same
customer and adapter asked with it before. Another customer, and another adapter, must find nothing: they start cold.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from replay.engine_bench.rig import Rig, image_of, prompt, write_adapters
from schemas.engine import StartSequence, Step
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape

SHARED, OWN = 512, 32


class Prefix(msgspec.Struct, frozen=True):
    """Medians and spread of time to first token, in ms; `cached` of a request's prompt tokens were there already."""

    who: str
    requests: int
    cached: int
    ttft_ms: float
    lowest_ms: float
    highest_ms: float


class _Asking(Rig):
    def ask(self, customer: str, content_id: str, number: int) -> tuple[float, int]:
        """One request alone, one token: milliseconds to it, and how many prompt tokens came from the cache."""
        self._events.clear()
        vocab = self.limits.vocab_size
        ids = prompt(0, SHARED, vocab) + prompt(1001 + number, OWN, vocab)
        self._seq += 1
        began = time.perf_counter()
        self._engine.handle(StartSequence(self._seq, customer, content_id, ids, [], 1, Sampling(seed=1), []))
        while self._engine.step():
            pass
        took_s = time.perf_counter() - began
        (finished,) = [f for _, event in self._events if isinstance(event, Step) for f in event.finished]
        return took_s * 1e3, finished.cached


def measure(
    model: Path, folder: Path, threads: int, rounds: int, stage: Callable[[str, int], Callable[[], None]]
) -> list[Prefix]:
    """Four kinds of asking: each round has a customer of its own for the first."""
    shape = ModelShape.of(model)
    images = [
        image_of(adapter, folder / f"image-{number}", shape)
        for number, adapter in enumerate(write_adapters(folder, shape, 2))
    ]
    rig = _Asking(model, threads, len(images), SHARED + OWN)
    mine, other = (rig.load(image).content_id for image in images)
    rig.ask("warm-up", mine, -1)
    told = stage("requests", 4 * rounds)
    seen: dict[str, list[tuple[float, int]]] = {}
    asked = itertools.count()
    for number in range(rounds):
        for who, customer, content_id in (
            ("cold: nobody asked before", f"acme-{number}", mine),
            ("warm: same customer and adapter", f"acme-{number}", mine),
            ("another customer, same adapter", f"globex-{number}", mine),
            ("same customer, another adapter", f"acme-{number}", other),
        ):
            seen.setdefault(who, []).append(rig.ask(customer, content_id, next(asked)))
            told()
    return [_prefix(who, found) for who, found in seen.items()]


def _prefix(who: str, found: list[tuple[float, int]]) -> Prefix:
    times = [ms for ms, _ in found]
    (cached,) = {cached for _, cached in found}
    return Prefix(who, len(found), cached, round(median(times), 1), round(min(times), 1), round(max(times), 1))
