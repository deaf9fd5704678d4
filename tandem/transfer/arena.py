"""The sender's outgoing memory of one link, and the slots it is cut into.

shm        a memory file, sealed against resizing; the receiver maps it through /proc/<pid>/fd/<fd>. It has no name
           in any file system, so nothing can stay behind when either side dies, at whatever moment.
otherwise  private memory that frames are gathered into and sent from

slot       free -> taken (gather, checksum) -> lent (queued, being read) -> free
           last in, first out: a receiver that keeps up keeps the working set small enough for the CPU's caches
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

from tandem.transfer.wire import ShmOffer

ASK_BYTES = 4 << 20  # few enough that the slots in use stay in the CPU's caches, many enough to be worth a message


class Arena:
    """`size` bytes. Dropping the last reference unmaps them, so a copy under way never loses its memory."""

    def __init__(self, memory: mmap.mmap, offer: ShmOffer | None = None) -> None:
        self.size = len(memory)
        self.offer = offer
        self.view = memoryview(memory)

    @classmethod
    def private(cls, size: int) -> Arena:
        return cls(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    @classmethod
    def shared(cls, size: int) -> Arena:
        """A new memory file; call `sent_out` once the receiver has had its chance to map it."""
        name = f"tandem-kv-{secrets.token_hex(16)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            raise
        return cls(memory, ShmOffer(pid=os.getpid(), fd=fd, name=name, size=size))

    @classmethod
    def attach(cls, offer: ShmOffer) -> Arena | None:
        """Maps a sender's memory file; None where this process cannot see it, as from another host."""
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        with suppress(OSError, ValueError):
            # The name holds 128 random bits, so the same pid and fd of another host are not mistaken for it.
            if os.readlink(path).split(" ")[0] != f"/memfd:{offer.name}":
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK  # else a shrink would kill this side
                if sealed and os.fstat(fd).st_size == offer.size:
                    return cls(mmap.mmap(fd, offer.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            finally:
                os.close(fd)
        return None

    def sent_out(self) -> None:
        """Idempotent: no process can map the arena from now on."""
        if self.offer is not None:
            os.close(self.offer.fd)
            self.offer = None


@dataclass(slots=True)
class Slot:
    """Arena memory that is its taker's until it is queued or given back.

    urgent: the receiver shall tell which slots it has read once it has read this one, and not wait for more to tell.
    """

    offset: int
    view: memoryview
    urgent: bool


class Slots:
    """Equal slots of an arena, each of `blocks` blocks; at least four where the arena has the room."""

    def __init__(self, arena: Arena, block_bytes: int, frame_bytes: int) -> None:
        self._arena = arena
        self.block_bytes = block_bytes
        self.blocks = max(1, min(frame_bytes, arena.size // 4) // block_bytes)
        slot_bytes = -(-self.blocks * block_bytes // 64) * 64  # rows start on a cache line
        self.count = arena.size // slot_bytes
        self._free = [slot * slot_bytes for slot in reversed(range(self.count))]
        self._unasked = 0  # bytes taken since a slot was urgent

    def take(self, nbytes: int) -> Slot | None:
        """The first `nbytes` of a free slot, or None."""
        if not self._free:
            return None
        start = self._free.pop()
        self._unasked += nbytes
        urgent = not self._free or self._unasked >= ASK_BYTES
        if urgent:
            self._unasked = 0
        return Slot(start, self._arena.view[start : start + nbytes], urgent)

    def give(self, offset: int) -> None:
        self._free.append(offset)
