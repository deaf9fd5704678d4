"""Blocks that no sequence holds while they move between this worker's cache and another's.

lend     cached ──> referenced, so that they stay as they are while they are sent ──> release
expect   of a chain: what is cached of it, and new blocks for the rest, which nobody can find
         ──> land: those that have come are findable ──> release
         ──> give_up: they may still be written, but no sequence waits for them ──> land, release

A sequence that needs an expected block next waits for it in the scheduler: so what expects blocks lands them or gives
them up within a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as chained

from tandem.engine.scheduling.block_pool import BlockPool


class MovingBlocks:
    """Each transfer's blocks, by its id. Without prefix caching nothing is expected, for nobody would find it."""

    def __init__(self, pool: BlockPool, prefix_caching: bool) -> None:
        self._pool, self._prefix_caching = pool, prefix_caching
        self._tables: dict[str, list[int]] = {}
        self._expected: dict[str, Sequence[bytes]] = {}  # their chains
        self._coming: dict[str, dict[bytes, None]] = {}  # names of the new ones, unless they were given up

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self) -> Iterator[Sequence[int]]:
        return iter(self._tables.values())

    def lend(self, transfer_id: str, names: Sequence[bytes]) -> list[int]:
        """Blocks of these names, up to the first that is not cached."""
        return self._hold(transfer_id, self._pool.take(0, self._pool.match(names)) or [])

    def lend_each(self, transfer_id: str, names: Sequence[bytes]) -> dict[bytes, int]:
        """Blocks of those of these names that are cached, by their names."""
        found = {name: block for name in names for block in self._pool.match([name])}
        self._hold(transfer_id, self._pool.take(0, list(found.values())) or [])
        return found

    def coming(self) -> set[bytes]:
        """Names of the blocks that transfers under way may bring."""
        return set(chained.from_iterable(self._coming.values()))

    def num_cached(self, names: Sequence[bytes]) -> int:
        """Blocks of these names that are cached, up to the first that is not."""
        return len(self._pool.match(names))

    def expect(self, transfer_id: str, chain: Sequence[bytes], spare: int) -> tuple[int, list[int]] | None:
        """Room for what is not cached of `chain`, a root and the names behind it: how many blocks are cached, and the
        new ones. None where all are, where another transfer brings the next one, or where fewer than `spare` blocks
        would stay free."""
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
        """The first so many of the new ones have come, whole and verified; all of them are released."""
        chain = self._expected[transfer_id]
        for i in range(num_cached, num_cached + num_landed):
            self._pool.register(self._tables[transfer_id][i], chain[i + 1], chain[i])
        self.release(transfer_id)

    def give_up(self, transfer_id: str) -> None:
        """Lets no sequence wait for its blocks any longer."""
        self._coming.pop(transfer_id, None)

    def release(self, transfer_id: str) -> None:
        self.give_up(transfer_id)
        self._expected.pop(transfer_id, None)
        self._pool.release(self._tables.pop(transfer_id, ()))

    def _hold(self, transfer_id: str, taken: list[int]) -> list[int]:
        assert transfer_id not in self._tables, f"{transfer_id} moves blocks already"
        self._tables[transfer_id] = taken
        return taken
