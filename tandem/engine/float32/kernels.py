"""The loaded library of float32.c, if this machine can have it.

It needs a CPU with AVX2 and FMA, a compiler (tandem.machine.native), and the OpenMP pool that torch brings. Where any
of them is missing, the reason is logged and torch computes everything. AVX512 is used where there is any.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence, Set
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

import structlog
import torch
from torch import Tensor

from tandem.machine.native import NotCompiled, compiled

SOURCE = Path(__file__).with_name("float32.c")
INSTRUCTIONS, WIDER = ("avx2", "fma"), ("avx512f",)
MAX_HEAD_DIM = 256  # MAX_DIM of float32.c
# The fewest multiplications worth a thread: ten or twenty microseconds. Waking a thread takes a few.
LEAST_WORK = 2**17

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_log = structlog.get_logger(__name__)


class _Attention(ctypes.Structure):
    """`struct attention` of float32.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("starts", "lengths", "table_starts", "tables")),
        *((name, _INT) for name in ("seqs", "heads", "kv_heads", "dim", "block_size")),
        *((name, _INT) for name in ("block_stride", "value_stride")),
        *((name, _POINTER) for name in ("q", "kv", "out")),
        *((name, _INT) for name in ("window", "next")),
    ]


class StepRows:
    """The rows of a step. Sequence i has `counts[i]` rows; the last of them is token number `lengths[i]` of the context
    in the blocks `tables[i]`."""

    def __init__(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        self._arrays = (
            array("q", accumulate(counts, initial=0)), array("q", lengths),
            array("q", accumulate(map(len, tables), initial=0)), array("i", chain.from_iterable(tables)),
        )  # fmt: skip
        self.seqs, self.scores = len(lengths), sum(map(int.__mul__, counts, lengths))

    def addresses(self) -> list[int]:
        return [values.buffer_info()[0] for values in self._arrays]


class Float32Kernels:
    """The loaded library; it computes on as many threads as torch does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear, self._attend = library.tandem_linear, library.tandem_attend
        self._linear.argtypes, self._linear.restype = [*[_POINTER] * 4, *[_INT] * 6], None
        self._attend.argtypes, self._attend.restype = [*[_POINTER] * 4, *[_INT] * 2], None
        size = ctypes.c_int64.in_dll(library, "tandem_attention_size").value
        if size != ctypes.sizeof(_Attention):
            raise AssertionError(f"_Attention differs from the kernels' {size} bytes")
        library.tandem_init(ctypes.CDLL(torch._C.__file__).GOMP_parallel)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes what torch's linear does. Each row of `weight` (outputs, inputs) must be contiguous."""
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, inputs), outputs = x.shape, len(weight)
        assert weight.shape[1] == inputs
        assert weight.dtype is torch.float32
        assert bias is None or bias.dtype is torch.float32
        out = x.new_empty(rows, outputs)
        self._linear(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            rows, inputs, outputs, x.stride(0), weight.stride(0), _threads(rows * inputs * outputs),
        )  # fmt: skip
        return out

    def attend(self, q: Tensor, kv: Tensor, rows: StepRows, window: int) -> Tensor:
        """Returns the attention of q (rows, heads, head_dim) over a layer's cache, in q's shape; `window` 0: all
        tokens.
        """
        q, (_, _, kv_heads, block_size, dim) = q.contiguous(), kv.shape
        assert kv[0, 0].is_contiguous()
        out, heads = torch.empty_like(q), q.shape[1]
        step = _Attention(*rows.addresses(), rows.seqs, heads, kv_heads, dim, block_size, kv.stride(0), kv.stride(1))
        threads = _threads(2 * rows.scores * heads * dim)
        self._attend(ctypes.byref(step), q.data_ptr(), kv.data_ptr(), out.data_ptr(), window, threads)
        return out


def library_path(cache: Path | None = None, flags: Sequence[str] = (), cpu: Set[str] | None = None) -> Path:
    """Compiles the library if necessary. `cpu`: the target CPU's instructions, by default this CPU's.

    Raises NotCompiled.
    """
    exact = ("-ffp-contract=off", "-fno-math-errno")
    return compiled(SOURCE, INSTRUCTIONS, *exact, *flags, also=WIDER, cache=cache, cpu=cpu)


@cache
def float32_kernels() -> Float32Kernels | None:
    """Returns this machine's kernels, or None, logging the reason, if it cannot have them."""
    try:
        return Float32Kernels(ctypes.CDLL(str(library_path())))
    except (OSError, AttributeError, ValueError, NotCompiled) as error:
        _log.warning("float32 kernels are off, torch computes everything", reason=str(error))
        return None


def _threads(work: int) -> int:
    return 1 if work < 2 * LEAST_WORK else min(work // LEAST_WORK, torch.get_num_threads())
