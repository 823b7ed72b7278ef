"""Children on a leash: gone with their starter, with what they started, and never two under one lock."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.local.child import Child, ChildError, Spec
from tests.stack import wait_until

SLEEP = (sys.executable, "-c", "print('ready or not', flush=True); import time; time.sleep(600)")
# Starts a child and tells its pid once the child has become its program, then waits to be killed.
STARTER = """
import sys, time
from pathlib import Path
from infra.local.child import Child, Spec
child = Child(Spec("sleeper", ("sh", "-c", "echo ready; exec sleep 600"), log=Path(sys.argv[1])))
while not child.said_ready():
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""


def spec(tmp_path: Path, *argv: str, **more: object) -> Spec:
    return Spec("sleeper", argv or SLEEP, log=tmp_path / "log", **more)  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_dies_with_its_starter_even_by_kill_9(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, cwd=root
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert not gone(pid)
        starter.kill()
    wait_until(lambda: gone(pid), 10, "the child's end")


def test_takes_what_it_started_along(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "sh", "-c", "sleep 600 & echo $!; exec sleep 600"))
    wait_until(lambda: child.output().strip().isdecimal(), 10, "the grandchild's pid")
    grandchild = int(child.output())
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: child.returncode() == -signal.SIGKILL, 10, "the child's end")
    wait_until(lambda: gone(grandchild), 10, "the grandchild's end")


def test_stops_by_term_and_by_kill_where_that_is_ignored(tmp_path: Path) -> None:
    assert Child(spec(tmp_path, "sleep", "600")).stop() == -signal.SIGTERM
    deaf = Child(spec(tmp_path, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done", stop_s=0.3))
    wait_until(deaf.said_ready, 10, "ready")
    assert deaf.stop() == -signal.SIGKILL


def test_ready_is_a_line_of_this_life(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ready long ago\n")
    child = Child(spec(tmp_path, "sleep", "600"))
    assert not child.said_ready()
    child.stop()
    child = Child(spec(tmp_path))
    wait_until(child.said_ready, 10, "ready")
    assert child.last_words() == "ready or not"
    child.stop()


def test_lock_outlives_the_starters_copy_and_ends_with_the_child(tmp_path: Path) -> None:
    locked = spec(tmp_path, "sleep", "600", lock=tmp_path / "folder" / "lock")
    child = Child(locked)
    with pytest.raises(ChildError, match="is in use by another process"):
        Child(locked)
    child.kill()
    child.stop()
    Child(locked).stop()


def test_logs_are_private_and_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.local.child.LOG_LIMIT_BYTES", 10)
    (tmp_path / "log").write_text("more than ten bytes")
    Child(spec(tmp_path, "true")).stop()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "log.1").read_text() == "more than ten bytes"
    assert (tmp_path / "log").read_text() == ""


def test_missing_program_is_an_exit_code(tmp_path: Path) -> None:
    child = Child(spec(tmp_path, "no-such-program"))
    wait_until(lambda: child.returncode() is not None, 10, "the end")
    assert child.returncode() == 1
    assert "no-such-program" in child.last_words(20) or "No such file" in child.last_words(20)
