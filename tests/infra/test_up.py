"""`lorafleet up` as people start it: the whole stack with the simulated engine, killed and stopped in every way."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.home import MARK, left_overs
from tests.stack import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
UP_LIMIT_S = 120


def lorafleet(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "infra", *arguments, "--home", str(home)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def up(home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor, once everything is ready. Killed at the end if it still runs."""
    argv = [sys.executable, "-m", "infra", "up", "--home", str(home)]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, "WORKER_ENGINE": "simulated"})
    try:
        wait_until(lambda: "Ctrl-C" in log.read_text() or process.poll() is not None, UP_LIMIT_S, "the stack")
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.kill()
        process.wait()


def status(home: Path) -> Any:
    result = lorafleet(home, "status", "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def parts(home: Path) -> dict[str, Any]:
    return {part["name"]: part for part in status(home)["state"]["parts"]}


def test_a_stacks_life(tmp_path: Path, model: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "up.log"
    with up(home, log) as supervisor:
        shown = status(home)
        assert shown["state"]["pid"] == supervisor.pid
        assert [part["name"] for part in shown["state"]["parts"] if part["phase"] == "ready"] == list(parts(home))
        assert {"kafka", "store", "clickhouse", "control", "sink", "worker-0", "gateway-0"} == set(parts(home))
        assert [replica["status"] for replica in shown["replicas"]] == ["ready"]
        assert "environment" not in shown["state"]  # it holds secrets

        second = lorafleet(home, "up")
        assert second.returncode == 3
        assert "a stack already runs" in second.stderr

        for name in ("kafka", "worker-0"):
            os.kill(parts(home)[name]["pid"], signal.SIGKILL)

        def healed() -> bool:
            now = parts(home)
            return all(now[name]["restarts"] and now[name]["phase"] == "ready" for name in ("kafka", "worker-0"))

        wait_until(healed, 90, "restarts")

        everything = left_overs(home)
        assert len(everything) >= 7
        supervisor.kill()
        supervisor.wait()
        wait_until(lambda: not left_overs(home), 20, "the end of every part after the supervisor's")
    assert lorafleet(home, "status").returncode == 3
    assert lorafleet(home, "down").returncode == 3

    stray = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(home)})
    with up(home, log) as supervisor:
        assert f"left over from a run that was killed, now stopped: processes {stray.pid}" in log.read_text()
        assert stray.wait(5) == -signal.SIGTERM
        assert parts(home)["kafka"]["address"] == shown["state"]["parts"][0]["address"]
        result = lorafleet(home, "down")
        assert (result.returncode, supervisor.wait(5)) == (0, 0)
    assert not left_overs(home)


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path, model: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "up.log"
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "infra", "up", "--home", str(home)]
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    wait_until(lambda: "clickhouse" in log.read_text() or "store" in log.read_text(), 60, "a part")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "stopped" in log.read_text()
    assert not left_overs(home)


def test_port_in_use_is_told(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = lorafleet(tmp_path, "up", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "something listens there already" in result.stderr
    assert not left_overs(tmp_path)


def test_ones_own_broker_that_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_STORE", "s3://mine")
    result = lorafleet(tmp_path, "up")
    assert result.returncode == 1
    assert "LORAFLEET_STORE=s3://mine needs S3_ENDPOINT_URL" in result.stderr
