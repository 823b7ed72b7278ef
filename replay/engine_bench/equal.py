"""Does a request say the same alone and in a crowd? Greedy requests of many adapters, to the token.

Alone: one at a time, every adapter in a slot, room for all. In the crowd: all of them at once and shuffled, as many in
the batch as it takes, with a fifth of the slots and with so few KV blocks that adapters are evicted and sequences
preempted again and again. Lengths differ, so that prompts are cut and rows of all kinds share steps.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from replay.engine_bench.rig import CHUNK, RANK, image_of, prompt, write_adapters
from schemas.engine import Event, LoadSlot, Missing, SlotEvicted, SlotFailed, StartSequence, Step
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape
from workers.engine.engine import Engine
from workers.engine.kv_blocks import BLOCK_TOKENS, blocks_for
from workers.engine.scheduler import Limits, Scheduler
from workers.engine.slots import Slots
from workers.engine.torch_runner import TorchRunner, operations

LENGTHS, OUTPUTS, ROWS = (9, 9, 24, 24, 40, 130), (4, 4, 4, 4, 160), 32
ADAPTERS_PER_SLOT = 5


class Equality(msgspec.Struct, frozen=True):
    """`differing` tokens of `tokens`, in `requests_differing` requests. `texts`: how many different answers there are.

    The crowd's: steps, most rows and most adapters in one, evictions, preemptions, prompt tokens from the prefix cache.
    """

    requests: int
    adapters: int
    tokens: int
    differing: int
    requests_differing: int
    texts: int
    steps: int
    most_rows: int
    most_adapters: int
    evictions: int
    preemptions: int
    cached: int


class _Engine:
    """An engine in this process; each adapter it misses is loaded at once."""

    def __init__(self, runner: TorchRunner, slots: int, blocks: int, images: list[LoadSlot]) -> None:
        self._images = {image.content_id: image for image in images}
        about, places = runner.model, Slots(slots)
        limits = Limits(about.vocab_size, about.context_length, blocks * BLOCK_TOKENS, ROWS, CHUNK)
        self.scheduler = Scheduler(limits, places)
        self.engine = Engine(self.scheduler, places, runner, self._heard, lambda: 0.0)
        self.answers: dict[int, list[int]] = {}
        self.joins: Counter[int] = Counter()
        self.steps = self.most_rows = self.most_adapters = self.evictions = self.cached = 0
        self.told: Callable[[], None] = lambda: None

    def run(self, *starts: StartSequence) -> None:
        """All at once, to their ends."""
        for start in starts:
            self.engine.handle(start)
        while self.engine.step() or self.scheduler.waiting:
            pass

    def _heard(self, event: Event) -> None:
        match event:
            case Missing():
                self.engine.handle(self._images[event.content_id])
            case SlotFailed():
                raise RuntimeError(f"an adapter did not load: {event.reason}")
            case SlotEvicted():
                self.evictions += 1
            case Step():
                self.steps += 1
                self.most_rows = max(self.most_rows, event.rows)
                self.most_adapters = max(self.most_adapters, event.adapters)
                self.joins.update(event.joined)
                for token in event.tokens:
                    self.answers.setdefault(token.seq, []).append(token.id)
                for finished in event.finished:
                    self.cached += finished.cached
                    self.told()


def measure(
    model: Path,
    folder: Path,
    threads: int,
    adapters: int,
    requests: int,
    stage: Callable[[str, int], Callable[[], None]],
) -> Equality:
    """Writes the adapters into `folder`, 20 MB each, twice."""
    shape = ModelShape.of(model)
    told = stage("adapters", adapters)
    images = []
    for number, adapter in enumerate(write_adapters(folder, shape, adapters)):
        images.append(image_of(adapter, folder / f"image-{number}", shape))
        told()
    starts = [
        StartSequence(
            seq=number,
            customer=f"customer-{number % adapters}",
            content_id=images[number % adapters].content_id,
            prompt=prompt(number // 2, LENGTHS[number % len(LENGTHS)], shape.vocab),
            generated=[],
            max_tokens=OUTPUTS[number // len(LENGTHS) % len(OUTPUTS)],
            sampling=Sampling(seed=1),
            stop_ids=[],
        )
        for number in range(requests)
    ]
    room = ROWS * blocks_for(max(LENGTHS) + max(OUTPUTS))
    tight = room // 4
    computing = operations(threads)
    alone = _Engine(
        TorchRunner(model, "bench", computing, {RANK: adapters}, room * BLOCK_TOKENS), adapters, room, images
    )
    told = stage("alone", requests)
    for start in starts:
        alone.run(start)
        told()
    slots = max(1, adapters // ADAPTERS_PER_SLOT)
    crowd = _Engine(TorchRunner(model, "bench", computing, {RANK: slots}, tight * BLOCK_TOKENS), slots, tight, images)
    crowd.told = stage("in the crowd", requests)
    random.Random(1).shuffle(starts)
    crowd.run(*starts)
    return _compared(adapters, alone, crowd)


def _compared(adapters: int, alone: _Engine, crowd: _Engine) -> Equality:
    pairs = [(answer, crowd.answers.get(seq, [])) for seq, answer in alone.answers.items()]
    differing = [sum(a != b for a, b in zip(one, two, strict=False)) + abs(len(one) - len(two)) for one, two in pairs]
    return Equality(
        requests=len(pairs),
        adapters=adapters,
        tokens=sum(len(one) for one, _ in pairs),
        differing=sum(differing),
        requests_differing=sum(map(bool, differing)),
        texts=len({tuple(one) for one, _ in pairs}),
        steps=crowd.steps,
        most_rows=crowd.most_rows,
        most_adapters=crowd.most_adapters,
        evictions=crowd.evictions,
        preemptions=sum(times - 1 for times in crowd.joins.values()),
        cached=crowd.cached,
    )
