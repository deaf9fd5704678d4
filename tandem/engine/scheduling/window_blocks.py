"""The places of blocks in the caches of layers with a window: a block has one only while it may be needed there.

    absent ──hold──> held ──drop──> free, but kept while its block has a name ──hold──> held
                                     └── its place goes to another block, the oldest first ──> absent

A block that is cached and absent here still counts for layers that see all tokens. So a prefix is cached as far as the
last window's blocks before its end are here too: `usable`. Place 0 is no block's, and is never written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.scheduling.windows import Windows


class WindowBlocks:
    """Gives places to the blocks 0 … num_blocks - 1. `at[block]` is a block's place, 0: it has none."""

    def __init__(self, windows: Windows, num_blocks: int) -> None:
        self.windows = windows
        self.num_places = windows.count(num_blocks) - 1
        self.at = [0] * num_blocks
        self._references = [0] * num_blocks
        # Free places, the first to be taken first, and the block that each still holds; -1: none.
        self._free: OrderedDict[int, int] = OrderedDict.fromkeys(range(1, self.num_places + 1), -1)
        self.is_named: Callable[[int], bool] = lambda block: False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def usable(self, blocks: Sequence[int], seen: int | None = None) -> int:
        """Returns how many of a prefix's `blocks` are of use: the last `seen` of these are here; None: a window's."""
        seen, run, best = self.windows.seen if seen is None else seen, 0, 0
        for count, block in enumerate(blocks, 1):
            run = run + 1 if self.at[block] else 0
            if run >= min(count, seen):
                best = count
        return best

    def has_room(self, blocks: Sequence[int], num_new: int, spare: int, leaving: Iterable[Sequence[int]] = ()) -> bool:
        """True if `hold` of `blocks` and of `num_new` absent ones succeeds, with `spare` places free after it, once
        the holders of `leaving` have dropped them."""
        left = Counter(block for table in leaving for block in table)
        freed = {block for block, count in left.items() if count == self._references[block]}
        absent = sum(not self.at[block] for block in blocks) + num_new
        kept = sum(bool(self.at[block]) and (not self._references[block] or block in freed) for block in blocks)
        return absent + spare <= len(self._free) + len(freed) - kept

    def hold(self, blocks: Sequence[int]) -> None:
        """Holds places for `blocks`, for which there is room."""
        for block in blocks:  # first those that are here, so that none of them is taken for another
            if place := self.at[block]:
                self._free.pop(place, None)
                self._references[block] += 1
        for block in blocks:
            if not self.at[block]:
                self.at[block] = self._take()
                self._references[block] = 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Drops `blocks`, in logical order: the last is kept longest."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                place = self.at[block]
                self._free[place] = block
                self._free.move_to_end(place, last=self.is_named(block))

    def forget(self, block: int) -> None:
        """Frees the place of a block that gets other contents, which nobody holds."""
        if place := self.at[block]:
            self.at[block], self._free[place] = 0, -1
            self._free.move_to_end(place, last=False)

    def take(self, count: int) -> list[int] | None:
        """Takes places of no block, for KV that is to come; None without room."""
        return [self._take() for _ in range(count)] if count <= len(self._free) else None

    def give(self, place: int, block: int = -1) -> None:
        """Gives back a place of `take`, which now has the contents of `block`, if any."""
        if block >= 0 and not self.at[block]:
            self.at[block] = place
        else:
            block = -1
        self._free[place] = block
        self._free.move_to_end(place, last=block >= 0)

    def _take(self) -> int:
        place, block = self._free.popitem(last=False)
        if block >= 0:
            self.at[block] = 0
        return place

    def check_integrity(self, held: Iterable[Sequence[int]], taken: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless `held` are the blocks of all holders, and `taken` the places of no block."""
        counted = Counter(block for blocks in held for block in blocks)
        for block, references in enumerate(self._references):
            assert references == counted[block], f"block {block}: {references} in windows, {counted[block]} hold it"
            assert self.at[block] or not references, f"block {block}: held in a window, where it has no place"
        places = [*filter(None, self.at), *(place for places in taken for place in places)]
        places += [place for place, block in self._free.items() if block < 0]
        assert sorted(places) == list(range(1, self.num_places + 1)), f"places of windows: {sorted(places)}"
        kept = {place: block for place, block in self._free.items() if block >= 0}
        assert all(self.at[block] == place for place, block in kept.items()), "a free place has another block"
        assert all(not self._references[block] for block in kept.values()), "a held block's place is free"
