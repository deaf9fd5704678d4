"""A prompt's look-up key for prefix caches: known holders of its beginning, and marks that find expected ones.

    held    (number of blocks from the first on, the generations that hold exactly that many), of a BlockReplica
    marks   blocks 1 2 … 16   18 20 … 32   36 40 … 64   72 …   and the last one
            every one         every 2nd    every 4th    every 8th

A worker that holds a block holds all blocks before it, so a binary search over the marks finds how much of the prompt a
worker is expected to hold, within 1/8 of it. The marks lie at the same blocks in every prompt, so that a request finds
what an earlier one with the same beginning is expected to leave in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

STEPS = 8
MARKED_HASH_BYTES = 8
Held = Sequence[tuple[int, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Valid for workers of this revision and block size. `marks` and `held` are in the format that select.lua reads."""

    revision: str
    block_size: int
    marks: bytes
    held: str

    @classmethod
    def of(cls, revision: str, block_size: int, block_hashes: Sequence[bytes], held: Held = ()) -> PromptPrefix:
        """Makes the prefix of a prompt whose full blocks have these names, in order."""
        marks = b"".join([prefix + block_hashes[i][:MARKED_HASH_BYTES] for i, prefix in _marks(len(block_hashes))])
        return cls(revision, block_size, marks, " ".join([_said(*part) for part in held]))


def _said(count: int, generations: Sequence[str]) -> str:
    return f"{count}:{','.join(generations)}"


@lru_cache(1024)
def _marks(num_blocks: int) -> list[tuple[int, bytes]]:
    """Returns (index of a marked block, number of blocks up to it as 4 bytes) for each mark."""
    counts: list[int] = []
    start, step = 0, 1
    while start < num_blocks:
        end = 2 * STEPS * step
        counts += range(start + step, min(end, num_blocks) + 1, step)
        start, step = end, 2 * step
    if counts and counts[-1] != num_blocks:
        counts.append(num_blocks)
    return [(count - 1, count.to_bytes(4, "little")) for count in counts]
