"""Blocks in host memory, by name; beyond the budget the block of least worth is dropped.

Used by one thread; `in` by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tandem.tiers.worth import Worth


class HostBlocks:
    """Blocks in memory, which is taken from the system as blocks come.

    Raises:
        ValueError: the budget is less than one block.
        MemoryError: the process has not enough address space.
    """

    num_damaged = 0

    def __init__(self, *, block_bytes: int, budget_bytes: int) -> None:
        num_blocks = budget_bytes // block_bytes
        if not num_blocks:
            raise ValueError(f"kv_host: {budget_bytes} bytes are less than one block of {block_bytes}")
        self._blocks = np.empty((num_blocks, block_bytes), np.uint8)
        self._slots: dict[bytes, int] = {}
        self._worth = Worth(num_blocks)

    @property
    def size(self) -> int:
        return self._worth.size

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def write(self, name: bytes, block: memoryview) -> None:
        """Keeps a block, of `block_bytes` bytes."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots.pop(self._worth.pop()) if self._worth.is_full else len(self._slots)
        self._blocks[slot] = np.frombuffer(block, np.uint8)
        self._slots[name] = slot
        self._worth.use(name)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Fills `block`. Returns False if there is no such block."""
        slot = self._slots.get(name)
        if slot is None:
            return False
        np.copyto(np.frombuffer(block, np.uint8), self._blocks[slot])
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """Marks blocks as used, the last one most recently."""
        for name in names:
            if name in self._slots:
                self._worth.use(name)

    def close(self) -> None:
        self._slots.clear()
