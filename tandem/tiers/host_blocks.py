"""Blocks in host memory, by name; beyond the budget the one that is worth least goes.

Used by one thread; `in` by any.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tandem.tiers.worth import Worth


class HostBlocks:
    """Memory is taken from the system as blocks come.

    Raises:
        ValueError: not one block fits into the budget.
        MemoryError: there is no address space for it.
    """

    num_damaged = 0

    def __init__(self, *, block_bytes: int, budget_bytes: int) -> None:
        num_blocks = budget_bytes // block_bytes
        if not num_blocks:
            raise ValueError(f"kv_host: {budget_bytes} bytes are less than one block of {block_bytes}")
        self._blocks = np.empty((num_blocks, block_bytes), np.uint8)
        self._slots: dict[bytes, int] = {}
        self._worth = Worth(num_blocks)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def write(self, name: bytes, block: memoryview) -> None:
        """Keep a block's bytes, `block_bytes` of them."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots.pop(self._worth.pop()) if self._worth.is_full else len(self._slots)
        self._blocks[slot] = np.frombuffer(block, np.uint8)
        self._slots[name] = slot
        self._worth.use(name)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Fill `block`; False where this one is not held."""
        slot = self._slots.get(name)
        if slot is None:
            return False
        np.copyto(np.frombuffer(block, np.uint8), self._blocks[slot])
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """They have been used, the last one most recently."""
        for name in names:
            if name in self._slots:
                self._worth.use(name)

    def close(self) -> None:
        self._slots.clear()
