"""Does it matter how many adapters are registered, when as many are active as always?

The engine sees slots alone. So each number is set up where a worker has it: records by adapter id and by content id,
and a disk tier's book-keeping that holds them all, which every request passes on its way to the engine. As many as
are active are always registered.
"""

from collections.abc import Callable
from statistics import median

import msgspec

from replay.engine_bench.rig import RANK, REQUESTS, Rig
from schemas.adapters import AdapterRecord
from schemas.engine import LoadSlot
from schemas.reasons import AdapterStatus
from workers.loader.shelf import Shelf

_ROUNDS = 3
_ADAPTER_BYTES = 20 << 20


class Registered(msgspec.Struct, frozen=True):
    """Output tokens per second, median of the rounds, and the change against the first number, in percent."""

    registered: int
    active: int
    tokens_s: float
    change_percent: float


def measure_registered(
    numbers: list[int],
    rig: Rig,
    images: list[LoadSlot],
    prompt: int,
    output: int,
    stage: Callable[[str, int], Callable[[], None]],
) -> list[Registered]:
    """The numbers take turns. `images` are the active adapters, all of them in slots already."""
    numbers = [max(number, len(images)) for number in numbers]
    told = stage("registered adapters", _ROUNDS * len(numbers))
    rates: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(_ROUNDS):
        for number in numbers[turn % 2 :] + numbers[: turn % 2]:
            table, disk = _worker(number, [image.content_id for image in images])
            contents = []
            for request in range(REQUESTS):
                record = table[f"c/a{request % len(images)}@1"]
                disk.lease(record.content_id, f"request {request}")
                disk.release(record.content_id, f"request {request}")
                contents.append(record.content_id)
            served = rig.serve(contents, prompt, output)
            rates[number].append(served.output_tokens / served.wall_s)
            told()
    first = median(rates[numbers[0]]) if numbers else 1.0
    return [
        Registered(number, len(images), round(median(got), 1), round((median(got) / first - 1) * 100, 2))
        for number, got in rates.items()
    ]


def _worker(number: int, active: list[str]) -> tuple[dict[str, AdapterRecord], Shelf]:
    """What a worker keeps of `number` registered adapters, the active ones among them."""
    contents = active + [f"{at:064x}" for at in range(len(active), number)]
    disk = Shelf(len(contents) * _ADAPTER_BYTES)
    table = {}
    for at, content_id in enumerate(contents):
        disk.reserve(content_id, _ADAPTER_BYTES, "made")
        disk.settle(content_id)
        disk.release(content_id, "made")
        adapter_id = f"c/a{at}@1"
        table[adapter_id] = _record(adapter_id, content_id)
    return table, disk


def _record(adapter_id: str, content_id: str) -> AdapterRecord:
    return AdapterRecord(
        adapter_id=adapter_id,
        customer="c",
        version=1,
        base_model_hash="bench",
        rank=RANK,
        alpha=float(RANK),
        target_modules=["q_proj"],
        size_bytes=_ADAPTER_BYTES,
        weights_uri=f"s3://adapters/{content_id}",
        checksum=content_id,
        source_uri="",
        source_checksum="",
        content_id=content_id,
        status=AdapterStatus.READY,
        command_partition=0,
        command_offset=0,
        updated_unix_ms=0,
    )
