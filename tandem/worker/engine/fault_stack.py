"""A stack for the fault handler on a thread that is not the first: so it speaks where the thread's own has run out."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SIZE = 1 << 16
SS_DISABLE = 2


class _Stack(ctypes.Structure):
    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def own_fault_stack() -> Iterator[None]:
    """On the thread that runs it. Linux only; elsewhere nothing changes."""
    if sys.platform != "linux":
        yield
        return
    memory, libc = ctypes.create_string_buffer(SIZE), ctypes.CDLL(None)
    libc.sigaltstack(ctypes.byref(_Stack(ctypes.addressof(memory), 0, SIZE)), None)
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(_Stack(None, SS_DISABLE, SIZE)), None)
