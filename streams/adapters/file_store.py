"""A store in a folder of this machine. No link is followed below the root, at no level, at no time.

Each part of a path is opened relative to the one before it, so that nobody can swap a folder for a link in between.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from streams.adapters.locations import Location
from streams.adapters.store import (
    CHUNK_BYTES,
    Denied,
    Fetched,
    NoFolder,
    NotFound,
    Stream,
    TooLarge,
    Unavailable,
    receive,
)


class FileStore:
    """Files below `root`, which itself may be reached over links: the operator named it."""

    def __init__(self, root: Location) -> None:
        self.root = root

    def get(self, location: Location, path: Path, limit_bytes: int) -> Fetched:
        with self.stream(location, limit_bytes) as stream:
            return receive(stream.chunks, path, limit_bytes)

    @contextlib.contextmanager
    def stream(self, location: Location, limit_bytes: int, start: int = 0) -> Iterator[Stream]:
        with self._opened(location) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit_bytes:
                raise TooLarge(f"{location}: {size} bytes; at most {limit_bytes} are accepted")
            os.lseek(descriptor, start, os.SEEK_SET)
            yield Stream(start, _chunks(descriptor, location))

    def put(self, path: Path, location: Location, sha256: str) -> None:
        segments = self._below(location)
        target = Path(self.root.path).joinpath(*segments)
        temporary = target.with_name(f".{target.name}-{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(path, temporary)
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise Unavailable(f"{location}: {error.strerror}") from error

    def stat(self, location: Location) -> int:
        with self._opened(location) as descriptor:
            return os.fstat(descriptor).st_size

    def _below(self, location: Location) -> tuple[str, ...]:
        segments = location.within(self.root)
        if segments is None:
            raise Denied(f"{location} is not below {self.root}")
        return segments

    @contextlib.contextmanager
    def _opened(self, location: Location) -> Iterator[int]:
        """A descriptor of a regular file."""
        segments = self._below(location)
        at = self._open(self.root.path, os.O_DIRECTORY, None, location)
        try:
            for index, segment in enumerate(segments):
                # Not to wait for the writer of a pipe that lies there instead of a file.
                kind = os.O_NONBLOCK if index == len(segments) - 1 else os.O_DIRECTORY
                inner = self._open(segment, kind | os.O_NOFOLLOW, at, location)
                os.close(at)
                at = inner
            if not stat.S_ISREG(os.fstat(at).st_mode):
                raise Denied(f"{location}: no regular file")
            yield at
        finally:
            os.close(at)

    @staticmethod
    def _open(name: str, flags: int, folder: int | None, location: Location) -> int:
        try:
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.ENXIO):
                raise Denied(f"{location}: {name} is a link, or not ours to read ({error.strerror})") from error
            if error.errno == errno.ENOENT:
                if folder is None:
                    raise NoFolder(f"{location}: there is no folder {name}") from error
                raise NotFound(f"{location}: there is no such file") from error
            raise Unavailable(f"{location}: {error.strerror}") from error


def _chunks(descriptor: int, location: Location) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except OSError as error:
            raise Unavailable(f"{location}: {error.strerror}") from error
        if not chunk:
            return
        yield chunk
