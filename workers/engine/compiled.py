"""kernels.cpp as a shared library: compiled once per source, flags and compiler, then found in the user's cache.

Two processes may compile at once; each renames its own finished file into place. A file ends with the digest of all
before it: one that a crash, a full disk or anything else left in pieces would end every engine that loads it, or
compute something else, and is built again. Where the cache takes no file, or none may be run from there, a process
builds for itself. No torch here.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from streams.adapters.user_cache import cache_folder

_LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.cpp")
# No contraction: which multiply and add become one is then written in the source, not chosen by the compiler.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w")
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma")
_ISA_FLAGS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
_ISA_NEEDS = {
    "avx512bf16": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16"},
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
COMPILE_TIMEOUT_S = 120
_DIGEST_BYTES = 32


class NoCompiler(Exception):
    """There are no kernels to be had here: no C++ compiler, one that hangs, or nothing that it built can be loaded."""


class Refused(NoCompiler):
    """The compiler refused the kernels for this isa; an older one may take them for another."""


def isas(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The vectors of this machine that the kernels know, best first: avx512bf16, avx512, avx2, portable."""
    flags = set(_cpu_flags(cpuinfo))
    return [isa for isa, needs in _ISA_NEEDS.items() if needs <= flags]


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split() for line in lines if line.startswith("flags")), [])


def best_isa() -> str:
    return isas()[0]


def library(isa: str) -> ctypes.CDLL:
    """The kernels for `isa`. CXX may have arguments, as make takes it. Raises NoCompiler."""
    told = os.environ.get("CXX") or "c++"
    try:
        compiler = shlex.split(told)
    except ValueError as error:
        raise NoCompiler(f"CXX: {told!r}: {error}") from error
    if not compiler or shutil.which(compiler[0]) is None:
        raise NoCompiler(f"no {told!r} is on the path")
    command = [*compiler, *_FLAGS, *_ISA_FLAGS[isa]]
    try:
        machine = [platform.machine(), _run([*compiler, "--version"])]
        if len(compiler) > 1:  # -march=native may be among them: where the home is shared, others have other CPUs
            machine += _cpu_flags()
        key = hashlib.sha256(repr((SOURCE.read_text(), command, machine)).encode()).hexdigest()[:24]
        return _loaded(command, cache_folder() / f"kernels-{isa}-{key}.so")
    except OSError as error:
        raise NoCompiler(f"{told}: {error}") from error


def _loaded(command: list[str], target: Path) -> ctypes.CDLL:
    """What is kept at `target`, else built anew, and left there for others if that can be written."""
    if _whole(target) and (kept := _library(target)):
        return kept
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / target.name
        _run([*command, str(SOURCE), "-o", str(built)])
        try:
            _keep(built, target)
        except OSError as error:
            _LOG.warning("the kernels are not kept, each start compiles them: %s", error)
            return ctypes.CDLL(str(built))
        return _library(target) or ctypes.CDLL(str(built))


def _library(path: Path) -> ctypes.CDLL | None:
    """None where nothing may be run from there."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("kernels that were kept cannot be loaded, each start compiles them: %s", error)
        return None


def _keep(built: Path, target: Path) -> None:
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        content = built.read_bytes()
        temporary.write_bytes(content + hashlib.sha256(content).digest())
        temporary.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _run(command: list[str]) -> bytes:
    """Its output. In time or not at all, and all that it started with it. Raises Refused, NoCompiler, OSError."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, process_group=0)
    try:
        out, err = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NoCompiler(f"{command[0]} took longer than {COMPILE_TIMEOUT_S} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise Refused(f"{command[0]}: {err.decode(errors='replace').strip()[:2000]}")
    return out


def _whole(target: Path) -> bool:
    """Whether this is a library as `_built` left it."""
    try:
        content = target.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
