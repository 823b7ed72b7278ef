"""The engine under measurement: its real classes in one process, the real base, strong random adapters.

No socket and no broker: what is timed is scheduling, the forward pass and sampling. Steps whose cost is compared are
computed by the runner itself, on rows that stand still, so that two kinds can take turns.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from safetensors.torch import load_file

from replay.peft_adapters import MODULES, write_random
from schemas.engine import Event, Leases, LoadSlot, SlotFailed, StartSequence, Step
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape
from workers.engine.engine import Engine
from workers.engine.kv_blocks import BLOCK_TOKENS, blocks_for
from workers.engine.scheduler import Failure, Limits, Row, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.slots import NO_ADAPTER, Lease, Slots
from workers.engine.torch_runner import TorchRunner, operations
from workers.slot_image import write_image

REQUESTS, RANK, CHUNK = 32, 16, 128
SPARE_BLOCKS = 2 * REQUESTS


class Served(msgspec.Struct, frozen=True):
    """One run of all requests: seconds to the last token, per request to the first one and between later ones."""

    wall_s: float
    output_tokens: int
    ttft_s: list[float]
    tpot_s: list[float]
    steps: int
    most_adapters: int


def prompt(seq: int, length: int, vocab: int) -> list[int]:
    """Ids that are the same for us and for every peer."""
    ids = np.random.default_rng(seq).integers(100, vocab, length)
    return [int(i) for i in ids]


def write_adapters(folder: Path, shape: ModelShape, count: int) -> Iterator[Path]:
    """One PEFT folder after the other: rank 16, all seven matrices of all layers."""
    for number in range(count):
        yield write_random(folder / f"adapter-{number}", shape, 1000 + number, RANK)


def image_of(adapter: Path, target: Path, shape: ModelShape) -> LoadSlot:
    """The slot image of a PEFT folder, and the command that loads it. Its content id is its path's hash."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    content_id = hashlib.sha256(str(adapter).encode()).hexdigest()
    parts = {}
    for layer in range(shape.layers):
        for name in shape.matrices():
            stem = f"base_model.model.model.layers.{layer}.{MODULES[name]}"
            parts[layer, name] = (
                tensors[f"{stem}.lora_A.weight"].float().numpy(),
                tensors[f"{stem}.lora_B.weight"].float().numpy(),
                1.0,
            )
    write_image(target, shape, RANK, content_id, parts)
    return LoadSlot(content_id, str(target))


class Rig:
    """`slots` adapters may be loaded. Raises RuntimeError if the engine does something else than it was asked for."""

    def __init__(self, model: Path, threads: int, slots: int, tokens_each: int) -> None:
        blocks = REQUESTS * blocks_for(tokens_each) * 2 + SPARE_BLOCKS
        self.operations = operations(threads)
        self.runner = TorchRunner(model, "bench", self.operations, {RANK: slots}, blocks * BLOCK_TOKENS)
        self.slots = Slots(slots)
        about = self.runner.model
        self.limits = Limits(
            about.vocab_size, about.context_length, blocks * BLOCK_TOKENS, prompt_tokens_per_step=CHUNK
        )
        self._events: list[tuple[float, Event]] = []
        scheduler = Scheduler(self.limits, self.slots)
        self._engine = Engine(scheduler, self.slots, self.runner, self._heard, time.perf_counter)
        self._stirred = False  # something was told to the engine in answer to an event: it is worth another step
        self._seq = 0
        self._tokens_each = tokens_each

    def load(self, command: LoadSlot) -> Lease:
        """Loads an adapter; the lease that a sequence with it would have."""
        self._engine.handle(command)
        self._engine.step()
        for _, event in self._events:
            if isinstance(event, SlotFailed):
                raise RuntimeError(f"an adapter did not load: {event.reason}")
        self._events.clear()
        return Lease(*self.slots.contents()[command.content_id], command.content_id)

    def serve(self, contents: list[str], prompt_tokens: int, output_tokens: int) -> Served:
        """One request for each content id ("": the base), all at once, greedy and without a stop."""
        self._events.clear()
        first = self._seq
        customer = f"bench-{first}"  # another one each time, or the prefix cache would have read the prompts already
        began = time.perf_counter()
        for content_id in contents:
            ids = prompt(self._seq - first, prompt_tokens, self.limits.vocab_size)
            self._engine.handle(
                StartSequence(
                    self._seq, customer, content_id, ids, [], output_tokens, Sampling(seed=1, temperature=0), []
                )
            )
            self._seq += 1
        while self._engine.step() or self._stirred:
            self._stirred = False
        return self._served(began, output_tokens, len(contents))

    def decode_rows(self, leases: list[Lease], length: int, group: int) -> list[Row]:
        """A decoding row for each lease, at position `length`; groups have KV blocks of their own."""
        return [self._row(number, lease, length, 1, group) for number, lease in enumerate(leases)]

    def prefill_rows(self, leases: list[Lease], group: int) -> list[Row]:
        """One chunk of prompt, cut into as many sequences as there are leases."""
        each = CHUNK // len(leases)
        return [self._row(number, lease, 0, each, group) for number, lease in enumerate(leases)]

    def timed(self, rows: list[Row]) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        outcomes = self.runner.run(rows)
        took = time.perf_counter() - began
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise RuntimeError(outcome.detail)
        return took

    def _row(self, number: int, lease: Lease, start: int, count: int, group: int) -> Row:
        length = start + count
        ids = prompt(number, length, self.limits.vocab_size)
        sampling = Sampling(seed=1, temperature=0)
        sequence = Sequence(
            StartSequence(number, "bench", lease.content_id, ids, [], 1, sampling, []),
            number,
            self.limits.context_length,
        )
        sequence.lease = lease
        each = blocks_for(self._tokens_each)
        first = (group % 2 * REQUESTS + number) * each
        return Row(sequence, start, count, True, list(range(first, first + blocks_for(length))))

    def _heard(self, event: Event) -> None:
        if not isinstance(event, Leases):  # that comes by the clock, whatever is measured
            self._events.append((time.perf_counter(), event))

    def _served(self, began: float, output_tokens: int, requests: int) -> Served:
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        count = most = steps = 0
        for at, event in self._events:
            if not isinstance(event, Step):
                raise RuntimeError(f"the engine said {event}")
            steps += 1
            most = max(most, event.adapters)
            for token in event.tokens:
                first.setdefault(token.seq, at)
                last[token.seq] = at
                count += 1
        if count != requests * output_tokens:
            raise RuntimeError(f"{count} tokens came, {requests * output_tokens} were asked for")
        return Served(
            wall_s=max(last.values()) - began,
            output_tokens=count,
            ttft_s=[at - began for at in first.values()],
            tpot_s=[(last[seq] - at) / max(1, output_tokens - 1) for seq, at in first.items()],
            steps=steps,
            most_adapters=most,
        )


def base_leases() -> list[Lease]:
    return [NO_ADAPTER] * REQUESTS


def shared(leases: list[Lease]) -> list[Lease]:
    """The leases dealt out over all requests."""
    return [leases[number % len(leases)] for number in range(REQUESTS)]


def turns(
    rig: Rig, kinds: dict[str, Callable[[int], list[Row]]], count: int, told: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of `count` steps of each kind, the kinds taking turns; each turn begins with another kind."""
    took: dict[str, list[float]] = {name: [] for name in kinds}
    names = list(kinds)
    for turn in range(-2, count):  # two turns to warm up
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            seconds = rig.timed(kinds[name](turn))
            if turn >= 0:
                took[name].append(seconds)
        told()
    return took
