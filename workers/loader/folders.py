"""The two folders that hold the tiers' files, and what is done with what earlier lives left in them.

Disk: WORKER_DATA/adapters/<content id>.safetensors, canonical files; they outlive the process, kill -9 included, since
each appears whole by a rename, has its header checked when a life begins, and every value whenever it is read. RAM:
images in shared memory, each life in a folder of its own that it holds a lock on: a life that is replaced may still be
ending when the next one has begun. What dead lives left, of any worker of this user, the next one to start removes:
memory outlives processes, a lock does not.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_CONTENT_ID = re.compile(r"[0-9a-f]{64}")
_LIFE = re.compile(r"lorafleet-[0-9a-f]{16}-[0-9]+-[0-9a-f]{16}")
_SUFFIX, _PART = ".safetensors", ".part"


class Folders:
    """Touches no file until `clean`."""

    def __init__(self, data: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        self._disk = data / "adapters"
        worker = hashlib.sha256(str(data.absolute()).encode()).hexdigest()[:16]
        self._ram = shared_memory / f"lorafleet-{worker}-{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = -1

    def disk(self, content_id: str) -> Path:
        return self._disk / f"{_checked(content_id)}{_SUFFIX}"

    def ram(self, content_id: str) -> Path:
        return self._ram / _checked(content_id)

    def part(self, content_id: str) -> Path:
        """Where a file for the disk lies until it is whole."""
        return self._disk / f"{_checked(content_id)}{_SUFFIX}{_PART}"

    def touch(self, content_ids: Iterable[str]) -> None:
        """Tells the next life what was used; the last one most. What is not there is passed over."""
        for content_id in content_ids:
            with contextlib.suppress(OSError):
                os.utime(self.disk(content_id))

    def clean(self) -> dict[str, int]:
        """Removes images and parts of earlier lives. What the disk holds: content id -> bytes, least recently used
        first. Raises OSError.
        """
        _sweep(self._ram.parent)
        # Locked before it has its name: whoever sweeps meanwhile must not find it without.
        unnamed = self._ram.with_name(f".{self._ram.name}")
        unnamed.mkdir(mode=0o700)
        self._lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self._ram)
        self._disk.mkdir(parents=True, exist_ok=True)
        kept: list[tuple[int, str, int]] = []
        for path in self._disk.iterdir():
            name = path.name.removesuffix(_SUFFIX)
            if path.name.endswith(_PART):
                path.unlink()
            elif path.name.endswith(_SUFFIX) and _CONTENT_ID.fullmatch(name):
                told = path.lstat()
                kept.append((told.st_mtime_ns, name, told.st_size))
        return {name: size for _, name, size in sorted(kept)}

    def remove_ram(self) -> None:
        """At the end of this life."""
        shutil.rmtree(self._ram, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(shared_memory: Path) -> None:
    """Removes the folders of lives that hold no lock any more. Others may put names there too: no link is followed."""
    for life in shared_memory.iterdir():
        if not _LIFE.fullmatch(life.name):
            continue
        with contextlib.suppress(OSError):  # another user's, locked, or just being removed
            descriptor = os.open(life, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(life)
            finally:
                os.close(descriptor)


def _checked(content_id: str) -> str:
    if not _CONTENT_ID.fullmatch(content_id):
        raise ValueError(f"content id {content_id[:80]!r} is no sha256 in hex")
    return content_id
