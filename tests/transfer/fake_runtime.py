"""A peer of cupy.cuda.runtime's memory handles on the CPU: memory files, which other processes map by their handle."""

from __future__ import annotations

import ctypes
import mmap
import os


class FakeRuntime:
    """One process's. Like the real one, a handle is 64 bytes and names a whole allocation."""

    def __init__(self) -> None:
        self.allocated: dict[int, tuple[int, mmap.mmap]] = {}
        self.mapped: dict[int, mmap.mmap] = {}

    def malloc(self, size: int) -> int:
        fd = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        pointer = _address(memory)
        self.allocated[pointer] = fd, memory
        return pointer

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        return f"{os.getpid()} {self.allocated[devPtr][0]}".encode().ljust(64)

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        pid, owned = handle.split()
        try:
            fd = os.open(f"/proc/{int(pid)}/fd/{int(owned)}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"cudaErrorInvalidResourceHandle: {error}") from None
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        pointer = _address(memory)
        self.mapped[pointer] = memory
        return pointer

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        del self.mapped[devPtr]

    def close(self) -> None:
        """Ends what would end with a real process."""
        for fd, _memory in self.allocated.values():
            os.close(fd)
        self.allocated.clear()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
