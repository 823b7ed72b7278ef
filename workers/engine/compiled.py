"""kernels.cpp as a shared library: compiled once per source, flags and compiler, then found in the user's cache.

Two processes may compile at once; each renames its own finished file into place. A file ends with the digest of all
before it: one that a crash, a full disk or anything else left in pieces would end every engine that loads it, or
compute something else, and is built again. Where the cache takes no file, a process builds for itself. No torch here.
"""

import ctypes
import hashlib
import logging
import os
import shutil
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
    """There is no C++ compiler, or it refused the kernels."""


def isas(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The vectors of this machine that the kernels know, best first: avx512bf16, avx512, avx2, portable."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return [isa for isa, needs in _ISA_NEEDS.items() if needs <= flags]


def best_isa() -> str:
    return isas()[0]


def library(isa: str) -> ctypes.CDLL:
    """The kernels for `isa`. Raises NoCompiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise NoCompiler("no c++ is on the path")
    flags = _FLAGS + _ISA_FLAGS[isa]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True)
        key = hashlib.sha256(repr((SOURCE.read_text(), flags, version.stdout)).encode()).hexdigest()[:24]
        target = cache_folder() / f"kernels-{isa}-{key}.so"
        return ctypes.CDLL(str(target)) if _whole(target) else _built([compiler, *flags], target)
    except subprocess.CalledProcessError as error:
        raise NoCompiler(f"{compiler}: {error.stderr.decode(errors='replace').strip()[:2000]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler}: {error}") from error


def _built(command: list[str], target: Path) -> ctypes.CDLL:
    """Compiles, and leaves the file at `target` for others if that can be written."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / target.name
        subprocess.run(
            [*command, str(SOURCE), "-o", str(built)], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True
        )
        temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            content = built.read_bytes()
            temporary.write_bytes(content + hashlib.sha256(content).digest())
            temporary.replace(target)
        except OSError as error:
            _LOG.warning("the kernels are not kept, each start compiles them: %s", error)
            return ctypes.CDLL(str(built))
    return ctypes.CDLL(str(target))


def _whole(target: Path) -> bool:
    """Whether this is a library as `_built` left it."""
    try:
        content = target.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
