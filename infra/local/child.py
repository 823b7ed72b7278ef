"""A child process: started on a leash, with a log of its own, stopped by its own id.

Owns one process group per child. The child dies with the process that started it (see leash.py), takes no signal of
the terminal, and may hold a file lock for as long as it lives: the lock outlasts a starter that was killed, so that a
second program never works in a folder whose first user is still alive. Children are started in the main thread.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
LEASH = Path(__file__).with_name("leash.py")
LOG_LIMIT_BYTES = 16 << 20


class ChildError(Exception):
    """A child that cannot be started or that did not become ready. The message is for people."""


@dataclass(frozen=True)
class Spec:
    """What to run. `env` is laid over this process' environment; `lock` is held while the child lives.

    `stop_s`: from SIGTERM to SIGKILL; 0 for a program that loses nothing by being killed at once.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    lock: Path | None = None
    stop_s: float = 10.0


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of one of our own modules."""
    return (sys.executable, "-m", module, *arguments)


class Child:
    """One life of one program."""

    def __init__(self, spec: Spec) -> None:
        """Starts it. Raises ChildError when the program is missing or its lock is held."""
        self.spec = spec
        self.started_s = time.monotonic()
        lock = _locked(spec.lock) if spec.lock else None
        log = _opened_log(spec.log)
        self._log_start = log.tell()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *spec.argv],
                env={**os.environ, **_python_env(), **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock] if lock is not None else [],
            )
        finally:
            log.close()
            if lock is not None:
                os.close(lock)  # the child has its own copy
        self._returncode: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    def returncode(self) -> int | None:
        """None while it runs. Once it has ended, what it left in its process group is killed too."""
        if self._returncode is None:
            # Look without reaping: until it is reaped, its id (and so its group's) cannot become anyone else's.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal_group(signal.SIGKILL)
            self._returncode = self._process.wait()
        return self._returncode

    def terminate(self) -> None:
        """Asks it to end; kills it if it has no time to end by itself."""
        if self.spec.stop_s == 0:
            self.kill()
        elif self.returncode() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and its process group at once."""
        if self.returncode() is None:
            self._signal_group(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, then SIGKILL after the limit. Blocks until it is gone; gives its exit code."""
        self.terminate()
        limit_s = time.monotonic() + self.spec.stop_s
        while (code := self.returncode()) is None:
            if time.monotonic() > limit_s:
                self.kill()
                limit_s = float("inf")
            time.sleep(0.02)
        return code

    def output(self) -> str:
        """What this life has written to its log so far."""
        with self.spec.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def said_ready(self) -> bool:
        """Whether a line that begins with `ready` has been printed: how our own parts say that they serve."""
        return any(line.startswith("ready") for line in self.output().splitlines())

    def last_words(self, lines: int = 5) -> str:
        return "\n".join(self.output().splitlines()[-lines:])

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _python_env() -> dict[str, str]:
    """Our modules are found wherever we are started from, and no folder of the same name there is taken for them."""
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _locked(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ChildError(
            f"{path.parent} is in use by another process (it holds {path.name}): stop that first"
        ) from None
    return lock


def _opened_log(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
        path.replace(path.with_suffix(path.suffix + ".1"))
    log = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    log.seek(0, os.SEEK_END)
    return log
