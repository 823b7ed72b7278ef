"""Where adapter files lie: one interface over S3 and folders. Synchronous: call it from a thread of a bounded pool.

A store is bound to a root, and reaches nothing outside it. A file appears whole or not at all, at either end.

StoreError
  NotFound      there is no such object, or no such bucket
  Denied        outside the root, a link, or the store does not let us
  TooLarge      more bytes than the caller accepts
  Unavailable   the store is away, too slow, or broke off: it may help to try again
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import msgspec

from streams.adapters.locations import Location

CHUNK_BYTES = 1 << 20
_PATIENCE_S = 30
_SLOWEST_BYTES_PER_S = 1 << 20


class StoreError(Exception):
    """Any of the errors of a store; the message may be shown to whoever named the file."""


class NotFound(StoreError):
    pass


class Denied(StoreError):
    pass


class TooLarge(StoreError):
    pass


class Unavailable(StoreError):
    pass


class NoFolder(Unavailable):
    """The folder that the store is, is not there: never made, misspelt, or unmounted for now."""


class S3Settings(msgspec.Struct, frozen=True):
    """One S3 endpoint for every s3:// location."""

    endpoint_url: str = ""
    access_key: str = ""
    secret_key: str = ""
    region: str = "us-east-1"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        return cls(
            env.get("S3_ENDPOINT_URL", ""),
            env.get("AWS_ACCESS_KEY_ID", ""),
            env.get("AWS_SECRET_ACCESS_KEY", ""),
            env.get("AWS_REGION") or "us-east-1",
        )

    def __repr__(self) -> str:
        return f"S3Settings(endpoint_url={self.endpoint_url!r}, access_key='***', secret_key='***')"


class Fetched(msgspec.Struct, frozen=True):
    """What arrived: its size and the sha256 of its bytes, in hex."""

    size_bytes: int
    sha256: str


class Stream(NamedTuple):
    """An object's bytes from `start` on. A store that knows no ranges begins at 0, wherever it was asked to."""

    start: int
    chunks: Iterator[bytes]


class Store(Protocol):
    """Raises StoreError; OSError only for the caller's own disk."""

    root: Location

    def get(self, location: Location, path: Path, limit_bytes: int) -> Fetched:
        """Copies the object to `path` on this machine, which appears when it is whole."""
        ...

    def stream(self, location: Location, limit_bytes: int, start: int = 0) -> AbstractContextManager[Stream]:
        """The object's bytes as they come, from `start` on. `limit_bytes`: of the whole object."""
        ...

    def put(self, path: Path, location: Location, sha256: str) -> None:
        """Stores the file at `path`, durably, replacing what is there."""
        ...

    def stat(self, location: Location) -> int:
        """The object's size in bytes."""
        ...


def open_store(root: Location, settings: S3Settings) -> Store:
    """Connects to nothing yet. Raises ValueError when an s3:// root has no usable endpoint."""
    if root.scheme == "s3":
        from streams.adapters.s3_store import S3Store  # slow to import, and not needed for files

        return S3Store(root, settings)
    from streams.adapters.file_store import FileStore

    return FileStore(root)


def write_all(file: RawIOBase, chunk: bytes) -> None:
    """Writes all of it, or raises OSError: a disk that is nearly full takes a part first, and says so by a count."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def receive(chunks: Iterator[bytes], path: Path, limit_bytes: int) -> Fetched:
    """Writes the chunks to a temporary file beside `path`, hashing on the way, then renames it. Leaves no part of one.

    Not synced to the disk: whoever reads the file later checks its content anyway.
    """
    digest, size, started_s = hashlib.sha256(), 0, time.monotonic()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-", suffix=".part")
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for chunk in chunks:
                size += len(chunk)
                if size > limit_bytes:
                    raise TooLarge(f"more than the {limit_bytes} bytes that such a file may have")
                if time.monotonic() - started_s > _PATIENCE_S + size / _SLOWEST_BYTES_PER_S:
                    raise Unavailable(f"too slow: {size} bytes in {time.monotonic() - started_s:.0f} s")
                digest.update(chunk)
                write_all(file, chunk)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return Fetched(size, digest.hexdigest())
