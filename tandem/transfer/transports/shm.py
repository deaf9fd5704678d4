"""Two processes of one host: payloads lie in a memory file that both map.

The file is sealed against resizing, and the receiver maps it through /proc/<pid>/fd/<fd>. The file has no name in any
file system, so no file remains when a side dies, at whatever moment.

           | released: a count, and a ring of slots that the receiver has read | slot | slot | ... |

The receiver releases slots in the file itself, because a message for each slot would wake a thread of the sender. The
ring has more places than there are slots, so it never overflows; the sender ignores offsets there that it has not lent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.copy.copier import Copier, load_copier
from tandem.transfer.copy.rows import Rows
from tandem.transfer.copy.store_policy import StorePolicy
from tandem.transfer.protocol.wire import INLINE, ControlBody, LinkMessage, parse
from tandem.transfer.transports.base import Mark, ReceiveSide, SendSide, Slot, Transport, Unusable
from tandem.transfer.transports.host import HostReceiveSide, HostSendSide

HEAD_BYTES = 4096
RING = HEAD_BYTES // 8 - 1


class ShmOffer(ControlBody):
    """The memory file `name` of `size` bytes: descriptor `fd` of process `pid`."""

    pid: int
    fd: int
    name: str
    size: int


class ShmSendSide(HostSendSide):
    start = HEAD_BYTES

    def __init__(self, size: int, copier: Copier) -> None:
        super().__init__(size, copier)
        name = f"tandem-kv-{secrets.token_hex(16)}"
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, HEAD_BYTES + size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.view = _mapped(self._fd, HEAD_BYTES + size)
        except BaseException:
            self.close()
            raise
        self._ring = self.view[:HEAD_BYTES].cast("Q")
        self._seen = 0
        self._policy = StorePolicy()
        self.offer = ShmOffer(pid=os.getpid(), fd=self._fd, name=name, size=HEAD_BYTES + size).model_dump()

    def gather(self, rows: Rows, ids: NDArray[np.int64], slot: Slot, behind: Mark | None = None) -> int:
        past_caches, start = self._policy.past_caches(), time.monotonic()
        payload_sum = self._copier.gather(rows, ids, self.payload(slot), past_caches)
        self._policy.took(past_caches, slot.nbytes, time.monotonic() - start)
        return payload_sum

    def open(self) -> bytes:
        self.close()  # the receiver has mapped the file, and no other process may
        return b""

    def released(self) -> list[int]:
        first = self._seen
        self._seen = max(first, min(self._ring[0], first + RING))
        return [self._ring[1 + place % RING] for place in range(first, self._seen)]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmReceiveSide(HostReceiveSide):
    """The receiver's side. Dropping the last reference to the memory unmaps it, so a copy under way keeps it."""

    def __init__(self, view: memoryview, copier: Copier) -> None:
        super().__init__("shm", copier)
        self._view = view
        self._ring = view[:HEAD_BYTES].cast("Q")

    def payload(self, message: LinkMessage) -> memoryview:
        return self._view[message.offset : message.offset + message.length]

    def fault(self, message: LinkMessage) -> str:
        if message.offset != INLINE and message.offset + message.length <= len(self._view):
            return ""
        text = f"offset {message.offset}, {message.length} bytes"
        return f"{text}: not in this link's memory of {len(self._view)} bytes"

    def release(self, messages: Iterable[LinkMessage]) -> None:
        self.release_offsets(message.offset for message in messages)

    def release_offsets(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            count = self._ring[0]
            self._ring[1 + count % RING] = offset
            self._ring[0] = count + 1  # written after the offset, which a sender reads once it sees the count


class ShmTransport(Transport):
    name = "shm"

    def __init__(self) -> None:
        self._copier = load_copier()

    def offer(self, size: int) -> SendSide:
        if sys.platform != "linux":
            raise Unusable("needs Linux: memory files")
        try:
            return ShmSendSide(size, self._copier)
        except OSError as error:
            raise Unusable(f"no shared memory to send from: {error}") from None

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        found = parse(ShmOffer, offer)
        if view := attached(found):
            return ShmReceiveSide(view, self._copier)
        raise Unusable(f"process {found.pid} of the sender shares no memory with this one: another host or container")


def attached(offer: ShmOffer) -> memoryview | None:
    """Maps the sender's memory file; None if this process cannot see it."""
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    with suppress(OSError, ValueError):
        # The name holds 128 random bits, so the same pid and fd of another host are not mistaken for it.
        if os.readlink(path).split(" ")[0] != f"/memfd:{offer.name}":
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Without the seal, shrinking the file would kill this process.
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if sealed and os.fstat(fd).st_size == offer.size >= HEAD_BYTES:
                return _mapped(fd, offer.size)
        finally:
            os.close(fd)
    return None


def _mapped(fd: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
