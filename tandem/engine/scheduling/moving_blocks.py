"""Blocks that no sequence holds while they move between this worker's cache and another's.

lend     cached ──> referenced, so that they stay as they are while they are sent ──> release
expect   of a chain: its cached blocks, and new blocks for the rest, which no sequence can find yet; for layers with a
         window, places for the last of what comes, or for all
         ──> land: blocks that have arrived are findable ──> release
         ──> give_up: they may still be written, but no sequence waits for them ──> land, release

A sequence that needs an expected block next waits for it in the scheduler. So a caller of `expect` must call `land` or
`give_up` within a bounded time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as chained
from typing import TYPE_CHECKING, NamedTuple

from tandem.engine.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from tandem.engine.kv import KVLayout


class LentBlocks(NamedTuple):
    """Cached blocks, and their places in layers with a window: 0 where they are not sent."""

    blocks: list[int]
    places: list[int]

    def of(self, layer: int, layout: KVLayout) -> list[int]:
        """Returns where the blocks lie in a layer's cache."""
        return self.places if layout.windows is not None and layer in layout.windows.layers else self.blocks


class ExpectedBlocks(NamedTuple):
    """How many blocks of a chain are cached, new blocks for the rest, and where windows of these go: one place may be
    several blocks', of which only the last is sent."""

    num_cached: int
    blocks: list[int]
    places: list[int]


class MovingBlocks:
    """The blocks of each transfer, by the transfer's id. Without prefix caching `expect` takes no blocks."""

    def __init__(self, pool: BlockPool, prefix_caching: bool) -> None:
        self._pool, self._prefix_caching = pool, prefix_caching
        self._tables: dict[str, list[int]] = {}
        self._expected: dict[str, Sequence[bytes]] = {}  # the chain of each transfer
        self._coming: dict[str, dict[bytes, None]] = {}  # names of the new blocks, until given up
        self._held: dict[str, list[int]] = {}  # blocks held in windows, of each transfer
        self._places: dict[str, list[int]] = {}  # places in windows for what is to come, of each transfer
        self._dropped: set[str] = set()  # transfers whose tenant's blocks were dropped since they began
        self.owners, self.counts = pool.owners, pool.counts

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self) -> Iterator[Sequence[int]]:
        return iter(self._tables.values())

    def held_in_windows(self) -> Iterator[Sequence[int]]:
        return iter(self._held.values())

    def places(self) -> Iterator[Sequence[int]]:
        return iter(self._places.values())

    def lend(self, transfer_id: str, names: Sequence[bytes]) -> LentBlocks:
        """References and returns the blocks of `names`, up to the first that is not cached."""
        windows = self._pool.windows
        moved = None if windows is None else windows.windows.moved
        blocks = self._hold(transfer_id, self._pool.take(0, self._pool.match(names, moved)) or [])
        return LentBlocks(blocks, self._held_places(transfer_id, blocks, len(blocks) if moved is None else moved))

    def lend_each(self, transfer_id: str, names: Sequence[bytes]) -> tuple[list[bytes], LentBlocks]:
        """References every cached block of `names`; returns the names of these, and the blocks."""
        found = {name: block for name in names for block in self._pool.match([name], 1)}
        blocks = self._hold(transfer_id, self._pool.take(0, list(found.values())) or [])
        return list(found), LentBlocks(blocks, self._held_places(transfer_id, blocks, len(blocks)))

    def _held_places(self, transfer_id: str, blocks: list[int], moved: int) -> list[int]:
        """Holds the last `moved` blocks in windows, too, and returns all blocks' places."""
        windows = self._pool.windows
        if windows is None:
            return []
        first = max(0, len(blocks) - moved)
        self._held[transfer_id] = blocks[first:]
        windows.hold(blocks[first:])
        return [0] * first + [windows.at[block] for block in blocks[first:]]

    def coming(self) -> set[bytes]:
        """Returns the names of the blocks that transfers under way may bring."""
        return set(chained.from_iterable(self._coming.values()))

    def num_cached(self, names: Sequence[bytes]) -> int:
        """Returns how many blocks of `names` are cached, up to the first that is not."""
        return len(self._pool.match(names))

    def expect(
        self, transfer_id: str, chain: Sequence[bytes], spare: int, *, is_whole: bool = False
    ) -> ExpectedBlocks | None:
        """Takes new blocks for the uncached part of `chain`, a root and the names after it. `is_whole`: layers with a
        window get all of these, not only a window's.

        Returns None if all are cached, if another transfer brings the first new one, if fewer than `spare` blocks
        would stay free, or if none of its tenant's may come.
        """
        cached = self._pool.match(chain[1:])
        new = chain[1 + len(cached) :]
        if not self._prefix_caching or not new or any(new[0] in names for names in self._coming.values()):
            return None
        if self.owners.is_held_off(chain[0]) or not self._pool.has_room(len(new), cached, spare):
            return None
        if (places := self._new_places(transfer_id, len(new), spare, is_whole)) is None:
            return None
        table = self._hold(transfer_id, self._pool.take(len(new), cached) or [])
        self._expected[transfer_id], self._coming[transfer_id] = chain, dict.fromkeys(new)
        return ExpectedBlocks(len(cached), table[len(cached) :], places)

    def _new_places(self, transfer_id: str, count: int, spare: int, is_whole: bool) -> list[int] | None:
        windows = self._pool.windows
        if windows is None:
            return []
        distinct = count if is_whole else min(count, windows.windows.moved)
        if windows.num_free < distinct + spare or (places := windows.take(distinct)) is None:
            return None
        self._places[transfer_id] = places
        return [places[i % distinct] for i in range(count)]

    def land(self, transfer_id: str, num_cached: int, num_landed: int) -> None:
        """Makes the first `num_landed` new blocks, which arrived verified, findable; releases all of the transfer's."""
        chain, table = self._expected[transfer_id], self._tables[transfer_id]
        places, windows = self._places.pop(transfer_id, []), self._pool.windows
        if transfer_id in self._dropped:
            num_landed = 0
        if windows is not None:
            for i in range(max(0, num_landed - len(places)), num_landed):
                windows.give(places[i % len(places)], table[num_cached + i])
            for place in places[num_landed:]:
                windows.give(place)
        for i in range(num_cached, num_cached + num_landed):
            self._pool.register(table[i], chain[i + 1], chain[i], chain[0])
        self.release(transfer_id)

    def drop(self, tenant: str | None) -> int:
        """Has nobody find a tenant's blocks again, None: anybody's, nor those that are still to land. Returns how many
        were cached.
        """
        for transfer_id, chain in self._expected.items():
            if self.owners.is_owned(chain[0], tenant):
                self._dropped.add(transfer_id)
                self.give_up(transfer_id)
        return self._pool.drop(tenant)

    def give_up(self, transfer_id: str) -> None:
        """Ends the waiting of sequences for the transfer's blocks."""
        self._coming.pop(transfer_id, None)

    def release(self, transfer_id: str) -> None:
        self.give_up(transfer_id)
        self._expected.pop(transfer_id, None)
        self._dropped.discard(transfer_id)
        if (windows := self._pool.windows) is not None:
            windows.drop(self._held.pop(transfer_id, ()))
            for place in self._places.pop(transfer_id, ()):
                windows.give(place)
        self._pool.release(self._tables.pop(transfer_id, ()))

    def _hold(self, transfer_id: str, taken: list[int]) -> list[int]:
        assert transfer_id not in self._tables, f"{transfer_id} moves blocks already"
        self._tables[transfer_id] = taken
        return taken
