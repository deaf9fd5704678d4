"""The compiled and loaded library of cpu.c, if this machine can have it.

It needs a CPU with AVX512-BF16, a compiler (tandem.machine.native), and the OpenMP pool that torch brings. Where any of
them is missing, the reason is logged and the engine computes with torch alone. AMX is used where there is any.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence, Set
from pathlib import Path

import structlog
import torch

from tandem.engine.kernels.structs import SIZES
from tandem.machine.native import NotCompiled, compiled

SOURCE = Path(__file__).with_name("cpu.c")
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
AMX = ("amx_tile", "amx_bf16")

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "tandem_has_amx": (_INT, []),
    "tandem_survey": (_INT, [_POINTER, *[_INT] * 3, _POINTER]),
    "tandem_pack": (None, [_POINTER, _INT, _POINTER]),
    "tandem_unpack_rows": (None, [_POINTER, _POINTER, _INT, _POINTER]),
    "tandem_layers": (_INT, [_POINTER, _POINTER, *[_INT] * 3]),
    "tandem_logits": (_INT, [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT]),
    "tandem_sample": (_INT, [*[_POINTER] * 2, *[_INT] * 2, *[_POINTER] * 3, _INT]),
}

_log = structlog.get_logger(__name__)


def library_path(
    cache: Path | None = None, amx: bool = True, flags: Sequence[str] = (), cpu: Set[str] | None = None
) -> Path:
    """Compiles the library if necessary. `cpu`: the target CPU's instructions, by default this CPU's.

    Raises NotCompiled.
    """
    also = AMX if amx else ()
    return compiled(SOURCE, INSTRUCTIONS, "-fno-math-errno", *flags, also=also, cache=cache, cpu=cpu)


def load_library(cache: Path | None = None, amx: bool = True, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Loads the compiled kernels, which are kept in `cache`; returns None and logs the reason if it cannot.

    `amx` False compiles for AVX512 alone. `flags`: further flags for the compiler.
    """
    try:
        library = ctypes.CDLL(str(library_path(cache, amx, flags)))
        # torch's extension module resolves the symbol in the OpenMP library it was linked with.
        openmp = ctypes.CDLL(torch._C.__file__)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        sizes = (ctypes.c_int64 * len(SIZES)).in_dll(library, "tandem_sizes")
        if list(sizes) != list(SIZES.values()):
            raise AssertionError(f"structs.py differs from the kernels: {SIZES}, {list(sizes)}")
        library.tandem_init(openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads)
    except (OSError, AttributeError, NotCompiled) as error:
        _log.warning("CPU kernels are off, torch computes everything", reason=str(error))
        return None
    _log.info("CPU kernels are on", amx=bool(library.tandem_has_amx()))
    return library
