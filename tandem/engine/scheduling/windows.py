"""Layers with a sliding window: how much of a context their cache holds, and how many blocks it has.

Such a layer's cache holds only blocks that later tokens may see, so it has fewer blocks than a layer that sees all
tokens has. A block of a sequence keeps its number everywhere; its KV in these layers lies at a number of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

# The caches are sized for contexts of so many windows: shorter ones run out of window blocks first, longer ones of
# the others.
TYPICAL_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Windows:
    """The `layers` that have a window of at most `seen` blocks before a token's own block.

    `typical`: the blocks of a context for which the caches' sizes are balanced.
    """

    layers: frozenset[int]
    seen: int
    typical: int

    @classmethod
    def of(cls, windows: tuple[int, ...], block_size: int, max_model_len: int) -> Windows | None:
        """Makes the windows of a model whose layers see `windows` tokens each, 0: all; None if none has a window."""
        layers = frozenset(layer for layer, window in enumerate(windows) if window)
        if not layers:
            return None
        widest = max(windows)
        seen = -(-(widest - 1) // block_size)
        typical = -(-min(TYPICAL_WINDOWS * widest, max_model_len) // block_size)
        return cls(layers, seen, max(typical, seen + 2))

    @property
    def moved(self) -> int:
        """The blocks of a prompt, from the last on, that its transfer has of these layers."""
        return self.seen + 1

    @property
    def held(self) -> int:
        """The blocks that a sequence holds: those that its next token may see, and one that a fetcher may need."""
        return self.seen + 2

    def first_moved(self, first_block: int, end: int) -> int:
        """Returns the first block that a transfer of blocks `first_block` … `end` has of these layers."""
        return max(first_block, end - self.moved)

    def count(self, num_blocks: int) -> int:
        """Returns how many blocks these layers' caches have beside `num_blocks` of the others; number 0 is never
        used."""
        return min(num_blocks, max(self.held + 2, -(-num_blocks * self.held // self.typical))) + 1
