"""The same model with its weights in bfloat16, beside itself in float32: requests and decode steps that take turns."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from safetensors.torch import load_file, save_file

from replay.engine_bench.rig import Rig, base_leases, shared
from schemas.engine import LoadSlot
from workers.engine.slots import Lease


class Narrow(msgspec.Struct, frozen=True):
    """With so many different adapters: medians, and those of the ratios bfloat16 over float32 in speed."""

    adapters: int
    f32_tokens_s: float
    bf16_tokens_s: float
    tokens_ratio: float
    f32_step_ms: float
    bf16_step_ms: float
    step_ratio: float


def bf16_copy(model: Path, target: Path) -> Path:
    """The folder of a model of one file, its weights rounded to bfloat16."""
    shutil.copytree(model, target)
    weights = target / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    return target


def measure_bf16(
    rig: Rig,
    narrow: Rig,
    images: list[LoadSlot],
    sizes: tuple[int, int],
    turns: tuple[int, int],
    stage: Callable[[str, int], Callable[[], None]],
) -> list[Narrow]:
    """Without and with all adapters. `sizes`: tokens in and out; `turns`: rounds of requests, pairs of decode steps.

    Nothing where the CPU computes both in float32.
    """
    if narrow.runner.model.numeric_class == rig.runner.model.numeric_class:
        return []
    rounds, pairs = turns
    told = stage("bfloat16", 2 * (rounds + pairs))
    rigs, found = (rig, narrow), []
    for count in (0, len(images)):
        loaded = [[_lease(each, image) for image in images[:count]] for each in rigs]
        leases = [shared(of) if of else base_leases() for of in loaded]
        contents = [lease.content_id for lease in leases[0]]
        length = sizes[0] + sizes[1] // 2
        rows = [each.decode_rows(of, length, 0) for each, of in zip(rigs, leases, strict=True)]
        rates: list[list[float]] = [[], []]
        took: list[list[float]] = [[], []]
        for turn in range(rounds):
            for at in (turn % 2, 1 - turn % 2):
                served = rigs[at].serve(contents, *sizes)
                rates[at].append(served.output_tokens / served.wall_s)
            told()
        for turn in range(-2, pairs):  # two turns to warm up
            for at in (turn % 2, 1 - turn % 2):
                seconds = rigs[at].timed(rows[at])
                if turn >= 0:
                    took[at].append(seconds)
            if turn >= 0:
                told()
        found.append(
            Narrow(
                adapters=count,
                f32_tokens_s=round(median(rates[0]), 1),
                bf16_tokens_s=round(median(rates[1]), 1),
                tokens_ratio=round(median(b / f for f, b in zip(*rates, strict=True)), 2),
                f32_step_ms=round(median(took[0]) * 1e3, 2),
                bf16_step_ms=round(median(took[1]) * 1e3, 2),
                step_ratio=round(median(f / b for f, b in zip(*took, strict=True)), 2),
            )
        )
    return found


def _lease(rig: Rig, image: LoadSlot) -> Lease:
    """Of the image in its slot, brought there if it is in none."""
    held = rig.slots.contents().get(image.content_id)
    return Lease(*held, image.content_id) if held else rig.load(image)
