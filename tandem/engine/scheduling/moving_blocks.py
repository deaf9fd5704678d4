"""Blocks that no sequence holds while they move between this worker's cache and another's.

lend     cached ──> referenced, so that they stay as they are while they are sent ──> release
expect   of a chain: its cached blocks, and new blocks for the rest, which no sequence can find yet
         ──> land: blocks that have arrived are findable ──> release
         ──> give_up: they may still be written, but no sequence waits for them ──> land, release

A sequence that needs an expected block next waits for it in the scheduler. So a caller of `expect` must call `land` or
`give_up` within a bounded time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as chained

from tandem.engine.scheduling.block_pool import BlockPool


class MovingBlocks:
    """The blocks of each transfer, by the transfer's id. Without prefix caching `expect` takes no blocks."""

    def __init__(self, pool: BlockPool, prefix_caching: bool) -> None:
        self._pool, self._prefix_caching = pool, prefix_caching
        self._tables: dict[str, list[int]] = {}
        self._expected: dict[str, Sequence[bytes]] = {}  # the chain of each transfer
        self._coming: dict[str, dict[bytes, None]] = {}  # names of the new blocks, until given up

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self) -> Iterator[Sequence[int]]:
        return iter(self._tables.values())

    def lend(self, transfer_id: str, names: Sequence[bytes]) -> list[int]:
        """References and returns the blocks of `names`, up to the first that is not cached."""
        return self._hold(transfer_id, self._pool.take(0, self._pool.match(names)) or [])

    def lend_each(self, transfer_id: str, names: Sequence[bytes]) -> dict[bytes, int]:
        """References and returns every cached block of `names`, by its name."""
        found = {name: block for name in names for block in self._pool.match([name])}
        self._hold(transfer_id, self._pool.take(0, list(found.values())) or [])
        return found

    def coming(self) -> set[bytes]:
        """Returns the names of the blocks that transfers under way may bring."""
        return set(chained.from_iterable(self._coming.values()))

    def num_cached(self, names: Sequence[bytes]) -> int:
        """Returns how many blocks of `names` are cached, up to the first that is not."""
        return len(self._pool.match(names))

    def expect(self, transfer_id: str, chain: Sequence[bytes], spare: int) -> tuple[int, list[int]] | None:
        """Takes new blocks for the uncached part of `chain`, a root and the names after it.

        Returns how many blocks are cached, and the new blocks. None if all are cached, if another transfer brings the
        first new one, or if fewer than `spare` blocks would stay free.
        """
        cached = self._pool.match(chain[1:])
        new = chain[1 + len(cached) :]
        if not self._prefix_caching or not new or any(new[0] in names for names in self._coming.values()):
            return None
        if not self._pool.has_room(len(new), cached, spare):
            return None
        table = self._hold(transfer_id, self._pool.take(len(new), cached) or [])
        self._expected[transfer_id], self._coming[transfer_id] = chain, dict.fromkeys(new)
        return len(cached), table[len(cached) :]

    def land(self, transfer_id: str, num_cached: int, num_landed: int) -> None:
        """Makes the first `num_landed` new blocks, which arrived verified, findable; releases all of the transfer's."""
        chain = self._expected[transfer_id]
        for i in range(num_cached, num_cached + num_landed):
            self._pool.register(self._tables[transfer_id][i], chain[i + 1], chain[i])
        self.release(transfer_id)

    def give_up(self, transfer_id: str) -> None:
        """Ends the waiting of sequences for the transfer's blocks."""
        self._coming.pop(transfer_id, None)

    def release(self, transfer_id: str) -> None:
        self.give_up(transfer_id)
        self._expected.pop(transfer_id, None)
        self._pool.release(self._tables.pop(transfer_id, ()))

    def _hold(self, transfer_id: str, taken: list[int]) -> list[int]:
        assert transfer_id not in self._tables, f"{transfer_id} moves blocks already"
        self._tables[transfer_id] = taken
        return taken
