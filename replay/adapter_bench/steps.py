"""Each step of an adapter's way into a slot, beside the least that it could take in the same run.

remote -> disk: the loader's download, checked and renamed, beside a plain GET of the object with the store's own
client. disk -> ram: the loader's image, checked and laid out, beside a plain copy of the file into shared memory.
ram -> slot: the engine's copy into a slot's memory, beside a memcpy of as many bytes. The two of a step take turns;
files are in the system's cache for both.
"""

import asyncio
import hashlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import msgspec
import numpy as np
from minio import Minio

from schemas.adapters import AdapterRecord
from schemas.reasons import AdapterStatus
from streams.adapters.canonical import write_canonical
from streams.adapters.delta import Array, Pair
from streams.adapters.locations import parse_location
from streams.adapters.shape import ModelShape
from streams.adapters.store import S3Settings, Store, open_store
from workers.engine.stacks import SlotStacks
from workers.loader.errand import Errand
from workers.loader.folders import SHARED_MEMORY, Folders
from workers.loader.images import Base
from workers.loader.loader import Loader
from workers.slot_image import open_image

TARGET = 1.3
BASE_HASH, RANK = "bench", 16
BRIEF_MS = {"remote -> disk": 400.0, "disk -> ram": 40.0, "ram -> slot": 8.0}  # of 80 MB, as the brief assumes
BUDGET_BYTES = 1 << 30


class Step(msgspec.Struct, frozen=True):
    """Medians over `rounds`, with the fastest and slowest; `ratio` of the medians to the other way's, `beside`."""

    adapter: str
    step: str
    bytes: int
    rounds: int
    ms: float
    lowest_ms: float
    highest_ms: float
    mb_s: float
    beside: str
    beside_ms: float
    beside_mb_s: float
    ratio: float
    held: bool
    brief_ms: float | None


async def measure_steps(
    name: str, shape: ModelShape, environment: dict[str, str], folder: Path, rounds: int, told: Callable[[], None]
) -> list[Step]:
    """One adapter of rank 16 on all matrices of `shape`, on the store of `environment`. `told` after each round."""
    settings = S3Settings.from_env(environment)
    store = open_store(parse_location(environment["LORAFLEET_STORE"]), settings)
    record = await asyncio.to_thread(_put, folder, shape, store)
    came: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-", dir=SHARED_MEMORY) as memory:
        for number in range(rounds + 1):
            way = _Ways(record, shape, store, _client(settings), Path(memory), folder / str(number))
            ours, others = await way.all_steps(number)
            if number:  # the first is to warm up
                for step in ours:
                    came.setdefault(step, []).append(ours[step])
                    beside.setdefault(step, []).append(others[step])
                told()
    brief = dict.fromkeys(BRIEF_MS, None) if record.size_bytes < 70e6 else BRIEF_MS
    return [
        _step(name, step, record.size_bytes, came[step], BESIDE[step], beside[step], brief[step]) for step in BRIEF_MS
    ]


BESIDE = {"remote -> disk": "the store's client", "disk -> ram": "a plain copy", "ram -> slot": "memcpy"}


class _Ways:
    """Both ways of each step, once. `memory` is in shared memory."""

    def __init__(
        self, record: AdapterRecord, shape: ModelShape, store: Store, client: Minio, memory: Path, folder: Path
    ) -> None:
        self._record, self._shape, self._store, self._client = record, shape, store, client
        self._memory, self._folder = memory, folder
        self._folders = Folders(folder, memory)

    async def all_steps(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of our steps and of the others'; who begins changes with `number`."""
        ours, others = dict.fromkeys(BRIEF_MS, 0.0), dict.fromkeys(BRIEF_MS, 0.0)
        self._folder.mkdir()
        base = Base(BASE_HASH, self._shape, (RANK,))
        loader = Loader(self._folders, self._store, base, BUDGET_BYTES, BUDGET_BYTES, lambda event: None)
        await loader.start()
        try:
            for step, to_ram in (("remote -> disk", False), ("disk -> ram", True)):
                for mine in (True, False) if number % 2 else (False, True):
                    began = time.perf_counter()
                    if mine:
                        await loader.pull(self._record, to_ram, Errand())
                        ours[step] = time.perf_counter() - began
                    else:
                        await asyncio.to_thread(self._copied if to_ram else self._got)
                        others[step] = time.perf_counter() - began
            async with loader.image(self._record) as image:
                ours["ram -> slot"], others["ram -> slot"] = await asyncio.to_thread(self._slots, image)
        finally:
            await loader.stop()
            shutil.rmtree(self._folder)
        return ours, others

    def _got(self) -> None:
        location = parse_location(self._record.weights_uri)
        self._client.fget_object(location.bucket, location.key, str(self._folder / "plain"))

    def _copied(self) -> None:
        target = self._memory / "plain"
        shutil.copyfile(self._folders.disk(self._record.content_id), target)
        target.unlink()

    def _slots(self, path: Path) -> tuple[float, float]:
        """Into slots that were filled before, as those of an engine at work are."""
        stacks = SlotStacks(self._shape, {RANK: 2})
        other = np.zeros(open_image(path, self._record.content_id, self._shape, RANK).payload_bytes, np.uint8)
        other[:] = 1
        row = stacks.pools[0].data[1].numpy().view(np.uint8)[: other.size]
        found = (0.0, 0.0)
        for _ in range(2):
            began = time.perf_counter()
            stacks.fill(1, open_image(path, self._record.content_id, self._shape, RANK))
            filled = time.perf_counter()
            np.copyto(row, other)
            found = filled - began, time.perf_counter() - filled
        return found


def _put(folder: Path, shape: ModelShape, store: Store) -> AdapterRecord:
    """A canonical file of bfloat16 values, as the registry writes them, in the store."""
    random = np.random.default_rng(0)

    def draw(*size: int) -> Array:
        return (random.standard_normal(size, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)

    path = folder / "canonical"
    content_id = write_canonical(
        path,
        {
            (layer, matrix): Pair(draw(RANK, k), draw(d, RANK), 1.0)
            for layer, (matrix, (k, d)) in itertools.product(range(shape.layers), shape.matrices().items())
        },
        BASE_HASH,
    )
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    location = store.root.under("bench", f"{content_id}.safetensors")
    store.put(path, location, checksum)
    size = path.stat().st_size
    path.unlink()
    return AdapterRecord(
        adapter_id="bench/steps@1",
        customer="bench",
        version=1,
        base_model_hash=BASE_HASH,
        rank=RANK,
        alpha=float(RANK),
        target_modules=["q_proj"],
        size_bytes=size,
        weights_uri=str(location),
        checksum=checksum,
        source_uri="",
        source_checksum="",
        content_id=content_id,
        status=AdapterStatus.READY,
        command_partition=0,
        command_offset=0,
        updated_unix_ms=0,
    )


def _client(settings: S3Settings) -> Minio:
    endpoint = urlsplit(settings.endpoint_url)
    secure = endpoint.scheme == "https"
    return Minio(
        endpoint.netloc,
        access_key=settings.access_key,
        secret_key=settings.secret_key,
        secure=secure,
        region=settings.region,
    )


def _step(
    name: str, step: str, size: int, ours: list[float], other: str, others: list[float], brief_ms: float | None
) -> Step:
    ratio = round(median(ours) / median(others), 2)
    return Step(
        adapter=name,
        step=step,
        bytes=size,
        rounds=len(ours),
        ms=round(median(ours) * 1e3, 2),
        lowest_ms=round(min(ours) * 1e3, 2),
        highest_ms=round(max(ours) * 1e3, 2),
        mb_s=round(size / median(ours) / 1e6),
        beside=other,
        beside_ms=round(median(others) * 1e3, 2),
        beside_mb_s=round(size / median(others) / 1e6),
        ratio=ratio,
        held=ratio <= TARGET,
        brief_ms=brief_ms,
    )
