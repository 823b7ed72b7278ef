"""The cache of compiled kernels: whatever became of a file there, an engine computes with the kernels of its source."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stack import wait_until
from workers.engine import compiled
from workers.engine.compiled import NoCompiler, isas, library
from workers.engine.reference import ReferenceOperations
from workers.engine.torch_runner import operations

# In a process of its own: what is broken may end it.
LOADS = "from workers.engine.compiled import library; library('portable').engine_threads(1); print('computes')"


def computes() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "computes\n"), done.stderr


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quick = tmp_path / "c++"
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("LORAFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: whole[:9000] + bytes(20000) + whole[29000:],
    ],
    ids=["empty", "half", "a byte short", "a hole"],
)
def test_a_file_in_pieces_is_built_again(cache: Path, broken: Callable[[bytes], bytes]) -> None:
    computes()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(broken(whole))
    computes()
    assert [file.name for file in cache.iterdir()] == [kept.name]
    assert kept.read_bytes() == whole


def test_a_whole_file_is_not_built_again(cache: Path) -> None:
    computes()
    (kept,) = cache.iterdir()
    before = kept.stat().st_mtime_ns
    computes()
    assert kept.stat().st_mtime_ns == before


def test_a_cache_that_takes_no_file_costs_a_build_and_no_more(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    library("portable").engine_threads(1)
    assert "not kept" in caplog.text


def test_a_cache_that_nothing_may_be_run_from_costs_a_build_and_no_more(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a home that is mounted noexec."""
    real = ctypes.CDLL

    def loads(path: str) -> ctypes.CDLL:
        if path.startswith(str(cache)):
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", loads)
    for _ in range(2):
        library("portable").engine_threads(1)
    assert "cannot be loaded" in caplog.text


def test_a_cache_that_is_full_is_left_as_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    library("portable").engine_threads(1)
    assert list(cache.iterdir()) == []


def test_a_compiler_may_have_arguments(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env GREETING='to you' {tmp_path / 'c++'} -g0")
    computes()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("compiler", "said", "tries"),
    [
        ("/nowhere/c++", "no '/nowhere/c++' is on the path", 1),
        ("c++ 'half", "No closing quotation", 1),
        ("false", "false", len(isas())),
        ("sh -c 'echo no such vectors >&2; exit 1'", "no such vectors", len(isas())),
        ("sh -c 'sleep 99; true'", "took longer than", 1),
    ],
)
def test_without_a_compiler_torch_computes_and_it_is_said_why(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
    said: str,
    tries: int,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(compiled, "COMPILE_TIMEOUT_S", 1)
    assert isinstance(operations(1), ReferenceOperations)
    told = [record.getMessage() for record in caplog.records if "no native kernels" in record.getMessage()]
    assert len(told) == tries
    assert all(said in line for line in told)
    assert [record for record in caplog.records if "torch computes instead" in record.getMessage()]


def test_what_a_compiler_that_hangs_has_started_ends_with_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"sh -c 'sleep 99 & echo $! > {tmp_path}/child; wait; true'")
    monkeypatch.setattr(compiled, "COMPILE_TIMEOUT_S", 1)
    with pytest.raises(NoCompiler, match="took longer"):
        library("portable")
    # A process that was killed goes when it is next scheduled.
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: _is_gone(child), 10, "the compiler's child has ended")


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_two_that_build_at_once_both_compute(cache: Path) -> None:
    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(computes), both.submit(computes)]:
            done.result()
    assert len(list(cache.iterdir())) == 1
