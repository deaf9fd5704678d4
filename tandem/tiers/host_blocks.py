"""Blocks in host memory, by name and owner; beyond the budget the block of least worth is dropped.

Used by one thread; `in` and `counts` by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from tandem.tiers.kept import ALL_ALIKE, KeepRules, KeptBlock, KeptBlocks


class HostBlocks:
    """Blocks in memory, which is taken from the system as blocks come.

    Raises:
        ValueError: the budget is less than one block.
        MemoryError: the process has not enough address space.
    """

    num_damaged = 0

    def __init__(
        self,
        *,
        block_bytes: int,
        budget_bytes: int,
        rules: KeepRules = ALL_ALIKE,
    ) -> None:
        self.size, self.block_bytes = budget_bytes // block_bytes, block_bytes
        if not self.size:
            raise ValueError(f"kv_host: {budget_bytes} bytes are less than one block of {block_bytes}")
        self._blocks = np.empty((self.size, block_bytes), np.uint8)
        self._slots: dict[bytes, int] = {}
        self._free: list[int] = []
        self._kept = KeptBlocks(self.size, rules)
        self.gone = self._kept.gone

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    @property
    def counts(self) -> Mapping[bytes, int]:
        """Returns how many blocks each owner has."""
        return self._kept.counts

    def write(self, name: bytes, owner: bytes, block: memoryview) -> None:
        """Keeps a block, of `block_bytes` bytes."""
        self._remove(self._kept.make_room(name, owner))
        slot = self._slots.get(name)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
        self._blocks[slot] = np.frombuffer(block, np.uint8)
        self._slots[name] = slot
        self._kept.use(name, owner)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Fills `block`. Returns False if there is no such block."""
        if name not in self._kept:
            return False
        np.copyto(np.frombuffer(block, np.uint8), self._blocks[self._slots[name]])
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """Marks blocks as used, the last one most recently."""
        for name in names:
            if name in self._kept and (owner := self._kept.owner(name)) is not None:
                self._kept.use(name, owner)

    def expire(self, most: int) -> int:
        """Drops up to `most` blocks that nobody has used for long. Returns how many it has dropped."""
        gone = self._kept.expire(most)
        self._remove(gone)
        return len(gone)

    def drop(self, owner: bytes | None) -> int:
        """Drops an owner's blocks; None: all. Returns how many there were."""
        gone = self._kept.drop(owner)
        self._remove(gone)
        return len(gone)

    def pin(self, owner: bytes, seconds: float) -> None:
        """Has an owner's blocks go by nobody else's pressure for so long; 0: no longer."""
        self._kept.pin(owner, seconds)

    def close(self) -> None:
        self._slots.clear()

    def _remove(self, gone: Iterable[KeptBlock]) -> None:
        self._free += [self._slots.pop(block.name) for block in gone]
