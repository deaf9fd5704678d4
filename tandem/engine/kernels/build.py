"""From cpu.c to a loaded library, compiled once per machine.

1 check    the CPU has AVX512-BF16, and torch brought an OpenMP pool to share
2 find     <cache>/tandem/kernels/<hash of source and flags>.so, the cache being XDG_CACHE_HOME or ~/.cache
3 compile  with the `ziglang` wheel, gcc or clang, into a name of its own, then rename: concurrent builders do no harm
4 load     with ctypes

Where any of it fails the reason is logged and the engine computes with torch alone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import structlog
import torch

_SOURCE = Path(__file__).with_name("cpu.c")
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16")
_FLAGS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", *(f"-m{name}" for name in _INSTRUCTIONS))
_COMPILE_TIMEOUT_S = 120.0

_log = structlog.get_logger(__name__)


def load_library(cache: Path | None = None) -> ctypes.CDLL | None:
    """The compiled kernels, kept in `cache`; None, and the reason logged, where there can be none."""
    try:
        _check_cpu()
        library = ctypes.CDLL(str(_compiled(cache or _cache())))
        # torch's own extension finds whichever OpenMP it was linked with.
        openmp = ctypes.CDLL(torch._C.__file__)
        library.tandem_init(openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads)
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        _log.warning("CPU kernels are off, torch computes everything", reason=str(error))
        return None
    return library


def _check_cpu() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().partition("\nflags")[2].partition("\n")[0].split()
    missing = {"avx512_bf16" if name == "avx512bf16" else name for name in _INSTRUCTIONS}.difference(flags)
    if missing:
        raise RuntimeError(f"this CPU lacks {', '.join(sorted(missing))}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "kernels"


def _compiled(cache: Path) -> Path:
    digest = blake2b(_SOURCE.read_bytes() + " ".join(_FLAGS).encode(), digest_size=16).hexdigest()
    target = cache / f"{digest}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _compile(Path(folder) / target.name).rename(target)
    return target


def _compile(output: Path) -> Path:
    """Try each compiler in turn; RuntimeError says what the last one complained of."""
    problem = "no C compiler found: install the ziglang wheel, gcc or clang"
    for compiler in _compilers():
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(output), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return output
        problem = f"{compiler[0]}: {done.stderr.strip()[-500:]}"
    raise RuntimeError(problem)


def _compilers() -> list[list[str]]:
    found = [[path] for name in ("gcc", "clang") if (path := shutil.which(name))]
    return [*found, [sys.executable, "-m", "ziglang", "cc"]] if find_spec("ziglang") else found
