"""The part of each sequence's blocks that its layers with a window hold: it slides along as the sequence is computed.

    enter ──> reach: drops what no later token sees, and holds the blocks of the next tokens ──> cut ──> leave

All that a sequence holds is one run of its block table, `window_start` … `window_end`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from tandem.engine.scheduling.sequence import Sequence
from tandem.engine.scheduling.window_blocks import WindowBlocks


class SequenceWindows:
    """Holds and drops the places of sequences' blocks; `block_size` is in tokens."""

    def __init__(self, blocks: WindowBlocks, block_size: int) -> None:
        self.blocks, self._block_size = blocks, block_size

    def first(self, start: int) -> int:
        """Returns the first block to hold while the token at `start` is the next one."""
        return max(0, start // self._block_size - self.blocks.windows.seen - 1)

    def has_room(self, cached: Items[int], first: int, end: int, spare: int, leaving: Items[Sequence]) -> bool:
        """True if `enter` succeeds for a sequence of these `cached` blocks, once `leaving` have left."""
        here = [block for block in cached[first:] if self.blocks.at[block]]
        num_new = end - max(first, len(cached))
        return self.blocks.has_room(here, num_new, spare, map(self.held, leaving))

    def enter(self, seq: Sequence, num_cached: int, first: int, end: int) -> None:
        """Holds blocks `first` … `end` of a sequence with a new block table; of cached ones, those that are here."""
        while first < num_cached and not self.blocks.at[seq.block_table[first]]:
            first += 1
        seq.window_start, seq.window_end = first, max(first, end)
        self.blocks.hold(self.held(seq))

    def reach(self, seq: Sequence, start: int, end: int) -> int:
        """Slides along to compute tokens `start` … `end`; returns the end, less than asked where too few places are
        free."""
        first = min(max(seq.window_start, self.first(start)), seq.window_end)
        if first > seq.window_start:
            self.blocks.drop(seq.block_table[seq.window_start : first])
            seq.window_start = first
        wanted = min(-(-end // self._block_size), len(seq.block_table)) - seq.window_end
        if wanted > 0:
            taken = min(wanted, self.blocks.num_free)
            self.blocks.hold(seq.block_table[seq.window_end : seq.window_end + taken])
            seq.window_end += taken
        return min(end, seq.window_end * self._block_size)

    def cut(self, seq: Sequence, end: int) -> None:
        """Drops blocks from number `end` of the table on."""
        if end < seq.window_end:
            self.blocks.drop(seq.block_table[end : seq.window_end])
            seq.window_end = end

    def held(self, seq: Sequence) -> list[int]:
        return seq.block_table[seq.window_start : seq.window_end]

    def leave(self, seq: Sequence) -> list[int]:
        """Returns the blocks that the sequence held, for the caller to drop."""
        held = self.held(seq)
        seq.window_start = seq.window_end = 0
        return held

    def check_integrity(self, live: Items[Sequence], lent: Iterable[Items[int]], places: Iterable[Items[int]]) -> None:
        """Raises AssertionError unless the sequences `live` and transfers, for `lent` blocks and free `places`, hold
        exactly what is held."""
        self.blocks.check_integrity([*map(self.held, live), *lent], places)
