"""One supervisor per home, and left-overs told from strangers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.home import MARK, Home, HomeInUse, left_overs, stop_processes, supervisor_pid
from infra.local.ports import Ports, is_free, pick
from infra.local.secret import kept_secret
from infra.state import PartState, Phase, StackState, read_state, write_state


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    assert supervisor_pid(tmp_path) is None
    with Home(tmp_path):
        assert supervisor_pid(tmp_path) == os.getpid()
        with pytest.raises(HomeInUse, match=f"already runs in {tmp_path} .supervisor {os.getpid()}"), Home(tmp_path):
            pass
        with Home(tmp_path / "other"):
            pass
    assert supervisor_pid(tmp_path) is None
    with Home(tmp_path):
        pass


def test_left_overs_are_those_of_this_home_alone(tmp_path: Path) -> None:
    def sleeper(home: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(home)})

    mine, others = sleeper(tmp_path), sleeper(tmp_path / "other")
    try:
        found = left_overs(tmp_path)
        assert [process.pid for process in found] == [mine.pid]
        stop_processes(found)
        assert not found[0].is_running()
        assert others.poll() is None
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()


def test_ports_are_kept_and_free(tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports.json")
    first = ports.allot("kafka")
    assert is_free(first)
    assert is_free(first + 10_000)
    assert first < 22_768
    assert Ports(tmp_path / "ports.json").allot("kafka") == first
    assert ports.allot("store") != first
    assert ports.allot("gateway", wanted=first) == first or not is_free(first)


def test_taken_port_is_replaced(tmp_path: Path) -> None:
    import socket

    ports = Ports(tmp_path / "ports.json")
    first = ports.allot("kafka")
    with socket.create_server(("127.0.0.1", first)):
        second = ports.allot("kafka")
    assert second != first
    assert ports.allot("kafka") == second


def test_two_stacks_that_start_at_once_get_different_ports(tmp_path: Path) -> None:
    """Long before either of them listens."""
    program = "import sys; from pathlib import Path; from infra.local.ports import Ports; " + (
        "print(Ports(Path(sys.argv[1])).allot('gateway-0', int(sys.argv[2])), flush=True); sys.stdin.read()"
    )
    wanted = pick(set())

    def stack(name: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", program, str(tmp_path / name), str(wanted)]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with stack("a") as first, stack("b") as second, stack("c") as third:
        ports = [int(process.stdout.readline()) for process in (first, second, third) if process.stdout]
        assert len(set(ports)) == 3
        assert wanted in ports
        for process in (first, second, third):
            assert process.stdin
            process.stdin.close()
    assert Ports(tmp_path / "d").allot("gateway-0", wanted) == wanted  # held by the living alone


def test_secrets_are_made_once_and_private(tmp_path: Path) -> None:
    key = kept_secret(tmp_path / "a" / "key", "lf-")
    assert key.startswith("lf-")
    assert len(key) == 46
    assert kept_secret(tmp_path / "a" / "key", "lf-") == key
    assert (tmp_path / "a" / "key").stat().st_mode & 0o777 == 0o600


def test_state_comes_back_and_is_private(tmp_path: Path) -> None:
    part = PartState("kafka", Phase.READY, 1, 2, 3, "127.0.0.1:1", "log")
    state = StackState(1, ["http://a"], ["http://b"], {"SECRET": "x"}, [part])
    assert read_state(tmp_path) is None
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "state.json").write_text('{"pid": 1')
    assert read_state(tmp_path) is None
