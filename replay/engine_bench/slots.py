"""More adapters than slots: does throughput fall off a cliff when loads and evictions set in?

The same requests each time, 128 tokens in and 32 out, dealt out evenly over the adapters and shuffled; more of them
than places in the batch, so that those whose adapter is in no slot wait while others pass. All adapters are in RAM.
"""

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from replay.engine_bench.rig import CHUNK, Rig, Served, image_of, write_adapters
from schemas.engine import Event, LoadSlot, Missing, SlotEvicted, SlotFailed, SlotLoaded, Step
from streams.adapters.shape import ModelShape

REQUESTS, PROMPT, OUTPUT = 96, CHUNK, 32
SLOTS, ADAPTERS = 8, 16


class Crowd(msgspec.Struct, frozen=True):
    """One number of adapters over SLOTS slots: medians of the rounds, and what moved in one of them."""

    adapters: int
    slots: int
    tokens_s: float
    lowest: float
    highest: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    loads: int
    evictions: int


class _Loading(Rig):
    """Answers the engine's Missing at once, as a worker does that has the image in RAM."""

    def __init__(self, model: Path, threads: int, images: list[LoadSlot]) -> None:
        super().__init__(model, threads, SLOTS, PROMPT + OUTPUT)
        self._images = {image.content_id: image for image in images}
        self.loads = self.evictions = 0

    def forget(self) -> None:
        """Every slot is empty, and so are the counts."""
        for content_id in list(self.slots.contents()):
            self.runner.clear(self.slots.vacate(content_id))
        self.loads = self.evictions = 0

    def _heard(self, event: Event) -> None:
        match event:
            case Missing():
                self._engine.handle(self._images[event.content_id])
                self._stirred = True
            case SlotLoaded():
                self.loads += 1
            case SlotEvicted():
                self.evictions += 1
            case SlotFailed():
                raise RuntimeError(f"an adapter did not load: {event.reason}")
            case Step():
                super()._heard(event)


def measure(
    model: Path, folder: Path, threads: int, rounds: int, stage: Callable[[str, int], Callable[[], None]]
) -> list[Crowd]:
    """SLOTS adapters and ADAPTERS of them, taking turns."""
    shape = ModelShape.of(model)
    told = stage("adapters", ADAPTERS)
    images = []
    for number, adapter in enumerate(write_adapters(folder, shape, ADAPTERS)):
        images.append(image_of(adapter, folder / f"image-{number}", shape))
        told()
    rig = _Loading(model, threads, images)
    told = stage("requests", 2 * rounds)
    runs: dict[int, list[Served]] = {SLOTS: [], ADAPTERS: []}
    moved: dict[int, tuple[int, int]] = {}
    for turn in range(rounds):
        for adapters in (SLOTS, ADAPTERS):
            contents = [images[number % adapters].content_id for number in range(REQUESTS)]
            random.Random(turn).shuffle(contents)
            rig.forget()
            runs[adapters].append(rig.serve(contents, PROMPT, OUTPUT))
            moved[adapters] = (rig.loads, rig.evictions)
            told()
    return [_crowd(adapters, found, *moved[adapters]) for adapters, found in runs.items()]


def _crowd(adapters: int, runs: list[Served], loads: int, evictions: int) -> Crowd:
    rates = [run.output_tokens / run.wall_s for run in runs]
    ttft_s = [second for run in runs for second in run.ttft_s]
    return Crowd(
        adapters=adapters,
        slots=SLOTS,
        tokens_s=round(median(rates), 1),
        lowest=round(min(rates), 1),
        highest=round(max(rates), 1),
        ttft_p50_ms=round(float(np.percentile(ttft_s, 50)) * 1e3),
        ttft_p95_ms=round(float(np.percentile(ttft_s, 95)) * 1e3),
        loads=loads,
        evictions=evictions,
    )
