"""The sender's outgoing memory of one link, and the slots it is cut into.

shm        a memory file, sealed against resizing; the receiver maps it through /proc/<pid>/fd/<fd>. It has no name
           in any file system, so nothing can stay behind when either side dies, at whatever moment.
otherwise  private memory that frames are gathered into and sent from

           | posted: a count, and a ring of slots that the receiver has read | slot | slot | ... |

slot       free -> taken (gather, checksum) -> lent (queued, being read) -> free
           shm: first in, first out, for what another core has just read is dear to write again
           otherwise last in, first out: the working set stays small enough for the CPU's caches

The receiver gives slots back in the file itself: a message would wake a thread of the sender for each. The ring holds
more than there are slots, so it never runs over; a sender believes of it only what it has lent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from tandem.transfer.protocol.wire import ShmOffer

HEAD_BYTES = 4096
RING = HEAD_BYTES // 8 - 1


class Arena:
    """`size` bytes for slots from `start` on. Dropping the last reference unmaps them: a copy under way keeps them."""

    def __init__(self, memory: mmap.mmap, start: int = 0, offer: ShmOffer | None = None) -> None:
        self.start, self.size = start, len(memory) - start
        self.offer = offer
        self.view = memoryview(memory)
        self._head = self.view[:start].cast("Q")  # the count, then the ring
        self._seen = 0

    def post(self, slots: Iterable[int]) -> None:
        """For the receiver: these have been read. One thread at a time."""
        for slot in slots:
            count = self._head[0]
            self._head[1 + count % RING] = slot
            self._head[0] = count + 1  # after the slot: whoever sees the count finds it

    def posted(self) -> list[int]:
        """For the sender: what has been posted since it last asked. One thread at a time."""
        if not self.start:
            return []
        first = self._seen
        self._seen = max(first, min(self._head[0], first + RING))
        return [self._head[1 + place % RING] for place in range(first, self._seen)]

    @classmethod
    def private(cls, size: int) -> Arena:
        return cls(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    @classmethod
    def shared(cls, size: int) -> Arena:
        """A new memory file with `size` bytes for slots; call `sent_out` once the receiver could map it."""
        name = f"tandem-kv-{secrets.token_hex(16)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, HEAD_BYTES + size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(fd, HEAD_BYTES + size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            raise
        return cls(memory, HEAD_BYTES, ShmOffer(pid=os.getpid(), fd=fd, name=name, size=HEAD_BYTES + size))

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
                if sealed and os.fstat(fd).st_size == offer.size > HEAD_BYTES:
                    return cls(mmap.mmap(fd, offer.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), HEAD_BYTES)
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
    """Arena memory that is its taker's until it is queued or given back."""

    offset: int
    view: memoryview


class Slots:
    """Equal slots of an arena, each of `blocks` blocks; at least four where the arena has the room.

    inline: this process's socket reads them.
    """

    def __init__(self, arena: Arena, block_bytes: int, frame_bytes: int, inline: bool) -> None:
        self._arena = arena
        self.block_bytes = block_bytes
        self.blocks = max(1, min(frame_bytes, arena.size // 4) // block_bytes)
        slot_bytes = -(-self.blocks * block_bytes // 64) * 64  # rows start on a cache line
        self.count = min(arena.size // slot_bytes, RING)
        self._free = deque(arena.start + slot * slot_bytes for slot in range(self.count))
        self._next = self._free.pop if inline else self._free.popleft

    def take(self, nbytes: int) -> Slot | None:
        """The first `nbytes` of a free slot, or None."""
        if not self._free:
            return None
        start = self._next()
        return Slot(start, self._arena.view[start : start + nbytes])

    def give(self, offset: int) -> None:
        self._free.append(offset)
