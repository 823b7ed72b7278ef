"""A life that loads one adapter and stops dead in a phase of it, to be killed there. Run as a program."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from schemas.adapters import AdapterRecord
from streams.adapters.file_store import FileStore
from streams.adapters.locations import Location, parse_location
from streams.adapters.store import Stream
from tests.streams.adapters.files import BASE_HASH, TINY
from tests.workers.loader.rig import RANK
from workers import slot_image
from workers.loader import images
from workers.loader.folders import Folders
from workers.loader.images import Base
from workers.loader.loader import Loader

PHASES = (
    "asked",
    "half a download",
    "a whole download",
    "on the disk",
    "read from the disk",
    "half an image",
    "a whole image",
    "in memory",
    "in use",
)


def stop_dead() -> None:
    """Says that the phase is reached."""
    print("there", flush=True)
    time.sleep(60)


def stopping(phase: str, wanted: str, function: Callable[..., Any], before: bool = False, at: int = 1) -> Any:
    """The function, which never comes back from its call number `at`, or never begins it."""
    calls = 0

    def called(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if phase == wanted and calls == at and before:
            stop_dead()
        result = function(*args, **named)
        if phase == wanted and calls == at:
            stop_dead()
        return result

    return called


class Stopping(FileStore):
    """Stops dead when asked, or after half a file."""

    def __init__(self, root: Location, phase: str) -> None:
        super().__init__(root)
        self._phase = phase

    @contextlib.contextmanager
    def stream(self, location: Location, limit_bytes: int, start: int = 0) -> Iterator[Stream]:
        if self._phase == "asked":
            stop_dead()
        with super().stream(location, limit_bytes, start) as stream:
            yield Stream(
                stream.start, self._halved(stream.chunks) if self._phase == "half a download" else stream.chunks
            )

    @staticmethod
    def _halved(chunks: Iterator[bytes]) -> Iterator[bytes]:
        chunk = next(chunks)
        yield chunk[: len(chunk) // 2]
        stop_dead()


async def live(folder: Path, phase: str) -> None:
    record = msgspec.json.decode((folder / "record.json").read_bytes(), type=AdapterRecord)
    store = Stopping(parse_location(f"file://{folder / 'remote'}"), phase)
    folders = Folders(folder / "data", folder / "memory")
    loader = Loader(folders, store, Base(BASE_HASH, TINY, (RANK,)), 1 << 30, 1 << 30, lambda event: None)
    await loader.start()
    os.replace = stopping(phase, "a whole download", os.replace, before=True)
    os.replace = stopping(phase, "on the disk", os.replace)
    os.replace = stopping(phase, "a whole image", os.replace, before=True, at=2)
    os.replace = stopping(phase, "in memory", os.replace, at=2)
    images.read_canonical = stopping(phase, "read from the disk", images.read_canonical)  # type: ignore[attr-defined]
    slot_image._write_at = stopping(phase, "half an image", slot_image._write_at, at=5)
    async with loader.image(record):
        stop_dead()


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), sys.argv[2]))
