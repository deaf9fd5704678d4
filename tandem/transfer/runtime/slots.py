"""A link's outgoing memory, a ring of slots as long as what lies in them.

slot    free -> taken (gather, checksum) -> lent (queued, being read) -> free

A slot is free for others once all taken before it are, too: they are read in the order in which they were queued. In
shared memory the ring goes round, because a line that another core has just read is slow to write again. Inline it
begins anew whenever it is empty: the working set stays small enough for the CPU's caches.
"""

from __future__ import annotations

from tandem.transfer.transports.base import SendSide, Slot

LINE = 64
MAX_SLOTS = 511  # as many as a side may have to remember


class Slots:
    """Frames of at most `blocks` blocks; at least four of that size where there is room."""

    def __init__(self, side: SendSide, block_bytes: int, frame_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = max(1, min(frame_bytes, side.size // 4) // block_bytes)
        self._start, self._end, self._inline = side.start, side.start + side.size, side.inline
        self._next = self._start
        self._taken: dict[int, bool] = {}  # the oldest first: whether it was released

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
        """`nbytes` that are free, from the beginning of a cache line on, or None."""
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
        """Behind the newest, or at the start where the end is too near."""
        if not self._taken:
            offset = self._start if self._inline or self._next + size > self._end else self._next
            return offset if offset + size <= self._end else None
        oldest = next(iter(self._taken))
        if self._next <= oldest:  # it has gone round
            return self._next if self._next + size <= oldest else None
        if self._next + size <= self._end:
            return self._next
        return self._start if self._start + size <= oldest else None


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
