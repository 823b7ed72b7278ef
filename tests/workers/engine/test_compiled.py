"""The cache of compiled kernels: whatever became of a file there, an engine computes with the kernels of its source."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.engine.compiled import library

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


def test_two_that_build_at_once_both_compute(cache: Path) -> None:
    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(computes), both.submit(computes)]:
            done.result()
    assert len(list(cache.iterdir())) == 1
