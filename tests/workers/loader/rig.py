"""A store with adapters in it, and loaders one after the other on the same folders."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from schemas.adapters import AdapterRecord
from schemas.reasons import AdapterStatus, Tier
from schemas.stats import CacheEvent
from streams.adapters.canonical import write_canonical
from streams.adapters.delta import Array, Pair
from streams.adapters.file_store import FileStore
from streams.adapters.locations import Location, parse_location
from streams.adapters.store import Store, Stream, Unavailable
from tests.streams.adapters.files import BASE_HASH, TINY
from workers.loader.folders import Folders
from workers.loader.images import Base
from workers.loader.loader import Loader
from workers.slot_image import Precision, image_bytes, open_image

RANK = 8
IMAGE = image_bytes(TINY, RANK, Precision.F32)


class Gate(FileStore):
    """The folder store, counted; it waits at a gate, fails, breaks off and lies when told to."""

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.starts: list[int] = []  # of each answer
        self.together = self.most_together = 0
        self.failures: list[Exception] = []
        self.breaks: list[int] = []  # bytes after which an answer ends with Unavailable
        self.says: list[bytes] = []  # instead of what is there
        self.ranges = True
        self._lock = threading.Lock()

    @property
    def fetches(self) -> int:
        return len(self.starts)

    @contextlib.contextmanager
    def stream(self, location: Location, limit_bytes: int, start: int = 0) -> Iterator[Stream]:
        start = start if self.ranges else 0
        with self._lock:
            self.starts.append(start)
            self.together += 1
            self.most_together = max(self.most_together, self.together)
        try:
            assert self.open.wait(30)
            if self.failures:
                raise self.failures.pop(0)
            with super().stream(location, limit_bytes, start) as stream:
                chunks = iter([self.says.pop(0)[start:]]) if self.says else stream.chunks
                yield Stream(start, self._broken(chunks, self.breaks.pop(0)) if self.breaks else chunks)
        finally:
            with self._lock:
                self.together -= 1

    @staticmethod
    def _broken(chunks: Iterator[bytes], after: int) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk[:after]
            after -= min(after, len(chunk))
            if not after:
                raise Unavailable("it broke off")


class Rig:
    """A store with adapters in it, and loaders one after the other on the same folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remote, self.memory, self.data = folder / "remote", folder / "memory", folder / "data"
        self.remote.mkdir()
        self.memory.mkdir()
        self.store = Gate(parse_location(f"file://{self.remote}"))
        self.events: list[CacheEvent] = []
        self._stack = AsyncExitStack()

    def adapter(self, seed: int, dtype: type[np.floating] = np.float32) -> AdapterRecord:
        """Writes a canonical file into the store, with values that `dtype` keeps."""
        values = np.random.default_rng(seed)

        def draw(*size: int) -> Array:
            return values.normal(size=size).astype(dtype).astype(np.float32)

        delta = {
            (layer, matrix): Pair(draw(4, k), draw(d, 4), 2.0)
            for layer in range(TINY.layers)
            for matrix, (k, d) in TINY.matrices().items()
        }
        path = self.remote / f"{seed}.safetensors"
        identity = write_canonical(path, delta, BASE_HASH)
        return AdapterRecord(
            adapter_id=f"acme/support@{seed + 1}",
            customer="acme",
            version=seed + 1,
            base_model_hash=BASE_HASH,
            rank=4,
            alpha=8.0,
            target_modules=["q_proj"],
            size_bytes=path.stat().st_size,
            weights_uri=f"file://{path}",
            checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
            source_uri="",
            source_checksum="",
            content_id=identity,
            status=AdapterStatus.READY,
            command_partition=0,
            command_offset=seed,
            updated_unix_ms=0,
        )

    async def loader(
        self,
        disk: int = 1 << 30,
        ram: int = 1 << 30,
        base: str = BASE_HASH,
        slot_ranks: tuple[int, ...] = (RANK,),
        store: Store | None = None,
    ) -> Loader:
        folders = Folders(self.data, self.memory)
        loader = Loader(folders, store or self.store, Base(base, TINY, slot_ranks), disk, ram, self.events.append, 3, 7)
        await loader.start()
        self._stack.push_async_callback(loader.stop)
        return loader

    async def close(self) -> None:
        self.store.open.set()
        await self._stack.aclose()

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in (self.data / "adapters").iterdir())

    def in_memory(self) -> list[str]:
        return sorted(path.name for path in self.memory.rglob("*") if path.is_file())

    def told(self) -> list[tuple[str, Tier, Tier]]:
        return [(event.event, event.tier, event.source) for event in self.events]


async def once(loader: Loader, record: AdapterRecord) -> Path:
    async with loader.image(record) as path:
        assert open_image(path, record.content_id, TINY, RANK).scale().any()
        return path


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  threads have no event to wait for
            await asyncio.sleep(0.005)


def nothing_left(rig: Rig, loader: Loader) -> None:
    """No file, no byte counted, no lease."""
    assert rig.on_disk() == []
    assert rig.in_memory() == []
    assert (loader.disk.used_bytes, loader.ram.used_bytes) == (0, 0)
    assert not loader.disk.leases()
    assert not loader.ram.leases()
