"""Which processes run on which cores, and what share of a core each takes. Linux."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def pin(pid: int, cores: Iterable[int]) -> None:
    """Every thread that the process has; those it makes later inherit it from the ones that make them."""
    kept = set(cores)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), kept)


@contextmanager
def kept_off(core: int) -> Iterator[set[int]]:
    """This process, and what it starts from here on, leave `core` to others; gives the cores that are left to them.

    Where there is only one core nothing is kept off it.
    """
    before = os.sched_getaffinity(0)
    rest = before - {core} or before
    pin(os.getpid(), rest)
    try:
        yield rest
    finally:
        pin(os.getpid(), before)


class Shares:
    """CPU time of some processes, by what they are, between two moments."""

    def __init__(self, processes: Mapping[str, Iterable[int]]) -> None:
        self._processes = {name: list(pids) for name, pids in processes.items()}
        self._began = time.perf_counter()
        self._before = self._now()

    def taken(self) -> dict[str, float]:
        """Shares of one core since the beginning."""
        seconds = time.perf_counter() - self._began
        return {name: round((now - self._before[name]) / seconds, 3) for name, now in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {name: sum(map(_cpu_s, pids)) for name, pids in self._processes.items()}


def pss_bytes(pid: int) -> int:
    """Its memory, with its part of what it shares."""
    return int(psutil.Process(pid).memory_full_info().pss)


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
