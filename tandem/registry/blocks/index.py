"""An index in memory of the KV blocks and the workers that hold them, up to a size.

    name (64 bits of a block's hash) ──> mask: bit s set where slot s holds the block
    slot = one generation of one worker's cache; `close` hides its blocks immediately and clears them bit by bit later

Masks are Python ints, so there may be any number of slots. The index is cut into shards of a few thousand names, so
that growing, clearing a slot or making room never blocks the process for long. A full shard drops its oldest names,
which costs cache misses and is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

SHARDS = 256
# A full shard drops one in so many of its names at a time.
DROPPED_PART = 16
MAX_MASKS = 1 << 16


def names_of(hashes: bytes | Sequence[bytes]) -> list[int]:
    """Returns the names of blocks. `hashes`: of 16 bytes each, as a list or joined."""
    joined = hashes if isinstance(hashes, bytes) else b"".join(hashes)
    return memoryview(joined).cast("Q").tolist()[::2]


class BlockIndex:
    """An index of block names, not thread-safe. `max_names` bounds its memory, at about 90 bytes per name."""

    def __init__(self, max_names: int) -> None:
        if max_names < SHARDS:
            raise ValueError(f"max_names must be at least {SHARDS}, got {max_names}")
        self.dropped = 0  # names dropped so far that a slot still held
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._per_shard = max_names // SHARDS
        self._masks: dict[int, int] = {}  # the one object shared by equal masks
        self._live = 0
        self._free: list[int] = []
        self._num_slots = 0
        self._dead = 0
        self._dead_since: dict[int, int] = {}  # closed slot: number of shards cleared of it
        self._next_shard = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def open(self) -> int:
        """Returns a new slot, which holds no blocks."""
        slot = heapq.heappop(self._free) if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        self._live |= 1 << slot
        return slot

    def close(self, slot: int) -> None:
        """Empties a slot immediately; `clear_some` makes it free for use again."""
        self._live &= ~(1 << slot)
        self._dead |= 1 << slot
        self._dead_since[slot] = 0

    def add(self, slot: int, names: Iterable[int]) -> None:
        bit = 1 << slot
        for name in names:
            shard = self._shards[name % SHARDS]
            held = shard.get(name)
            if held is None:
                if len(shard) >= self._per_shard:
                    self._make_room(shard)
                held = 0
            shard[name] = self._masks.setdefault(held | bit, held | bit)
        if len(self._masks) > MAX_MASKS:
            self._masks.clear()

    def remove(self, slot: int, names: Iterable[int]) -> None:
        for name in names:
            shard = self._shards[name % SHARDS]
            self._keep(shard, name, shard.get(name, 0) & ~(1 << slot))

    def holders(self, names: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the holders of a prompt's first blocks, as (number of blocks, mask of the slots that hold exactly
        that many of them from the first on), ascending.
        """
        found, mask, before = [], self._live, None
        for count, name in enumerate(names):
            held = self._shards[name % SHARDS].get(name, 0)
            if held is before:  # equal masks are nearly always one object
                continue
            before, still = held, held & mask
            if still != mask:
                if count:
                    found.append((count, mask ^ still))
                mask = still
                if not mask:
                    return found
        return [*found, (len(names), mask)] if names and mask else found

    def clear_some(self) -> bool:
        """Clears the closed slots from one shard. Returns False if there is nothing to clear."""
        if not self._dead:
            return False
        shard = self._shards[self._next_shard]
        self._next_shard = (self._next_shard + 1) % SHARDS
        for name, mask in [(name, mask) for name, mask in shard.items() if mask & self._dead]:
            self._keep(shard, name, mask & ~self._dead)
        for slot in list(self._dead_since):
            self._dead_since[slot] += 1
            if self._dead_since[slot] == SHARDS:
                self._reuse(slot)
        return True

    def _reuse(self, slot: int) -> None:
        del self._dead_since[slot]
        self._dead &= ~(1 << slot)
        heapq.heappush(self._free, slot)

    def _keep(self, shard: dict[int, int], name: int, mask: int) -> None:
        if mask:
            shard[name] = self._masks.setdefault(mask, mask)
        else:
            shard.pop(name, None)

    def _make_room(self, shard: dict[int, int]) -> None:
        for name in list(islice(shard, max(1, len(shard) // DROPPED_PART))):
            self.dropped += bool(shard.pop(name) & self._live)


def slots_of(mask: int) -> Iterator[int]:
    """Yields the slots of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
