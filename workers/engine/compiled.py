"""kernels.cpp as a shared library: compiled once per source, flags and compiler, then found in the user's cache.

Two processes may compile at once; each renames its own finished file into place. No torch here.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from streams.adapters.user_cache import cache_folder

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
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
            command = [compiler, *flags, str(SOURCE), "-o", str(temporary)]
            subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True)
            temporary.replace(target)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as error:
        raise NoCompiler(f"{compiler}: {error.stderr.decode(errors='replace').strip()[:2000]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler}: {error}") from error
