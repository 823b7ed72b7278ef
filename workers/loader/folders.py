"""The two folders that hold the tiers' files, and what is done with what an earlier life left in them.

Disk: WORKER_DATA/adapters/<content id>.safetensors, canonical files; they outlive the process, kill -9 included, since
each appears whole by a rename and is checked again whenever it is read. RAM: images in shared memory, below a folder
named after WORKER_DATA, each life in a folder of its own: a life that is replaced may still be ending when the next one
has begun. A new life removes those of the others.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_CONTENT_ID = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".safetensors"


class Folders:
    """Touches no file until `clean`."""

    def __init__(self, data: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        self._disk = data / "adapters"
        name = hashlib.sha256(str(data.absolute()).encode()).hexdigest()[:16]
        self._lives = shared_memory / f"lorafleet-{name}"
        self._ram = self._lives / f"{os.getpid()}-{secrets.token_hex(4)}"

    def disk(self, content_id: str) -> Path:
        return self._disk / f"{_checked(content_id)}{_SUFFIX}"

    def ram(self, content_id: str) -> Path:
        return self._ram / _checked(content_id)

    def clean(self) -> dict[str, int]:
        """Removes images and parts of an earlier life. What the disk holds: content id -> bytes, least recently used
        first. Raises OSError.
        """
        self._disk.mkdir(parents=True, exist_ok=True)
        self._lives.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(self._lives)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{self._lives} is not a folder of our own: remove it")
        for life in self._lives.iterdir():
            shutil.rmtree(life, ignore_errors=True)
        self._ram.mkdir(mode=0o700)
        kept: list[tuple[int, str, int]] = []
        for path in self._disk.iterdir():
            name = path.name.removesuffix(_SUFFIX)
            if path.name.endswith(".part"):
                path.unlink()
            elif path.name.endswith(_SUFFIX) and _CONTENT_ID.fullmatch(name):
                told = path.stat()
                kept.append((told.st_mtime_ns, name, told.st_size))
        return {name: size for _, name, size in sorted(kept)}

    def remove_ram(self) -> None:
        """At the end of this life: what is in shared memory outlives processes."""
        shutil.rmtree(self._ram, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lives.rmdir()  # unless another life is in it


def _checked(content_id: str) -> str:
    if not _CONTENT_ID.fullmatch(content_id):
        raise ValueError(f"content id {content_id[:80]!r} is no sha256 in hex")
    return content_id
