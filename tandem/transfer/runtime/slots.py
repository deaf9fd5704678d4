"""A link's outgoing memory: a ring of slots, each as long as its payload.

slot    free -> taken (gather, checksum) -> lent (queued, being read) -> free

A slot can be taken again once it and all slots taken before it are free, because slots are read in the order in which
they were queued. In shared memory the ring goes round, because a line that another core has just read is slow to write.
With inline payloads the ring starts again at its beginning whenever it is empty, so it stays in the CPU's caches.
"""

from __future__ import annotations

from tandem.transfer.transports.base import SendSide, Slot

LINE = 64
MAX_SLOTS = 511  # the most slots that a side can keep account of: the size of shm's ring


class Slots:
    """The ring of slots for frames of at most `blocks` blocks; the memory has room for at least four of them."""

    def __init__(self, side: SendSide, block_bytes: int, frame_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = max(1, min(frame_bytes, side.size // 4) // block_bytes)
        self._start, self._end, self._inline = side.start, side.start + side.size, side.inline
        self._next = self._start
        self._taken: dict[int, bool] = {}  # offset: whether released; the oldest first

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def frame_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def holds_a_block(self) -> bool:
        return _in_lines(self.block_bytes) <= self._end - self._start

    def take(self, nbytes: int) -> Slot | None:
        """Takes a slot of `nbytes` that starts on a cache line; None if there is no room."""
        size = _in_lines(nbytes)
        offset = self._place(size)
        if offset is None or len(self._taken) == MAX_SLOTS:
            return None
        self._next, self._taken[offset] = offset + size, False
        return Slot(offset, nbytes)

    def give(self, offset: int) -> None:
        self._taken[offset] = True
        while self._taken and self._taken[oldest := next(iter(self._taken))]:
            del self._taken[oldest]

    def _place(self, size: int) -> int | None:
        """Returns a free offset after the newest slot, or at the start if too little is left before the end."""
        if not self._taken:
            offset = self._start if self._inline or self._next + size > self._end else self._next
            return offset if offset + size <= self._end else None
        oldest = next(iter(self._taken))
        if self._next <= oldest:  # the ring has wrapped around
            return self._next if self._next + size <= oldest else None
        if self._next + size <= self._end:
            return self._next
        return self._start if self._start + size <= oldest else None


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
