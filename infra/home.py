"""A home folder and its one supervisor: a lock that the kernel drops with its holder, and the search for left-overs.

Every process of a stack carries MARK in its environment, naming the home. Whoever holds the lock knows that any process
with that mark was left by a supervisor that is dead; a process id that was given to someone else never has the mark.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

MARK = "LORAFLEET_MARK"
LOCK = "supervisor.lock"
STOP_LIMIT_S = 10.0


class HomeInUse(Exception):
    """Another supervisor has this home."""


class Home:
    """`with Home(folder): ...` makes the folder and holds its lock. Raises HomeInUse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            holder = _holder(self.folder)
            raise HomeInUse(f"a stack already runs in {self.folder} (supervisor {holder}): lorafleet down") from None
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def supervisor_pid(folder: Path) -> int | None:
    """The supervisor that runs in this home now."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(folder)
    finally:
        os.close(lock)
    return None


def mark_of(folder: Path) -> dict[str, str]:
    return {MARK: str(folder.absolute())}


def left_overs(folder: Path) -> list[psutil.Process]:
    """Processes of this home's stack. Ask only while holding its lock: then none of them has a supervisor."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder.absolute()):
                found.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or not ours to look at
            continue
    return found


def stop_processes(processes: list[psutil.Process]) -> None:
    """SIGTERM, and SIGKILL for what is still there after the limit. Blocks."""
    for process in processes:
        _signal(process, psutil.Process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=STOP_LIMIT_S)
    for process in alive:
        _signal(process, psutil.Process.kill)
    psutil.wait_procs(alive, timeout=STOP_LIMIT_S)


def _signal(process: psutil.Process, send: Callable[[psutil.Process], None]) -> None:
    with contextlib.suppress(psutil.Error):
        send(process)


def _holder(folder: Path) -> int:
    text = (folder / LOCK).read_text()
    return int(text) if text.isdecimal() else 0
