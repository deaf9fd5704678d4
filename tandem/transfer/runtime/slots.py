"""A link's outgoing memory, cut into slots.

slot    free -> taken (gather, checksum) -> lent (queued, being read) -> free
        in shared memory first in, first out, because a line that another core has just read is slow to write again
        inline last in, first out: the working set stays small enough for the CPU's caches
"""

from __future__ import annotations

from collections import deque

from tandem.transfer.transports.base import SendSide, Slot

LINE = 64
MAX_SLOTS = 511  # as many as a side may have to remember


class Slots:
    """Equal slots of a side, each of `blocks` blocks; at least four where there is room."""

    def __init__(self, side: SendSide, block_bytes: int, frame_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = max(1, min(frame_bytes, side.size // 4) // block_bytes)
        slot_bytes = -(-self.blocks * block_bytes // LINE) * LINE  # rows start on a cache line
        self.count = min(side.size // slot_bytes, MAX_SLOTS)
        self._free = deque(side.start + slot * slot_bytes for slot in range(self.count))
        self._next = self._free.pop if side.inline else self._free.popleft

    @property
    def num_taken(self) -> int:
        return self.count - len(self._free)

    @property
    def frame_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def take(self, nbytes: int) -> Slot | None:
        """The first `nbytes` of a free slot, or None."""
        return Slot(self._next(), nbytes) if self._free else None

    def give(self, offset: int) -> None:
        self._free.append(offset)
