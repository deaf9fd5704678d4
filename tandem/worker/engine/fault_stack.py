"""A stack for the fault handler on threads besides the main one, so that it can report a stack overflow there."""

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
    """Gives the calling thread a signal stack of its own inside the block. Linux only; does nothing elsewhere."""
    if sys.platform != "linux":
        yield
        return
    memory, libc = ctypes.create_string_buffer(SIZE), ctypes.CDLL(None)
    libc.sigaltstack(ctypes.byref(_Stack(ctypes.addressof(memory), 0, SIZE)), None)
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(_Stack(None, SS_DISABLE, SIZE)), None)
