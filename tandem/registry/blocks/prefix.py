"""How a prompt is looked up in prefix caches: who is known to hold how much of it, and by which marks more is expected.

    held    (so many blocks from the first on, the generations that hold just so many), as a BlockReplica knows
    marks   blocks 1 2 … 16   18 20 … 32   36 40 … 64   72 …   and the last one
            every one         every 2nd    every 4th    every 8th

A chain's presence is monotonic (who holds a block holds those before it), so a search that halves over the marks finds
how much of the prompt is expected at a worker, within 1/8 of it. The marks lie at the same blocks in every prompt: what
one request is expected to leave behind, the next one with the same beginning finds.
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
    """Valid for workers of this revision and block size. Marks and holders are as select.lua reads them."""

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
    """Index of each marked block, and its count as written."""
    counts: list[int] = []
    start, step = 0, 1
    while start < num_blocks:
        end = 2 * STEPS * step
        counts += range(start + step, min(end, num_blocks) + 1, step)
        start, step = end, 2 * step
    if counts and counts[-1] != num_blocks:
        counts.append(num_blocks)
    return [(count - 1, count.to_bytes(4, "little")) for count in counts]
