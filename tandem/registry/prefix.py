"""How a prompt is looked up in prefix caches: by the names of some of its blocks, at most a few hundred of them.

    blocks   1 2 3 … 63 64   66 68 … 128   132 136 … 256   264 …   and the last one
             every one       every 2nd     every 4th       every 8th

A chain's presence is monotonic (who holds a block holds those before it), so a binary search over these finds how much
of the prompt a worker holds, within 1/32 of it. The marks lie at the same blocks in every prompt: what one request is
expected to leave behind, the next one with the same beginning finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 32


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Valid for workers of this revision and block size. `hashes[i]` names block `counts[i] - 1` of the prompt."""

    revision: str
    block_size: int
    counts: Sequence[int]
    hashes: Sequence[bytes]

    @classmethod
    def of(cls, revision: str, block_size: int, block_hashes: Sequence[bytes]) -> PromptPrefix:
        """Of a prompt whose full blocks have these names, in order."""
        counts = _marks(len(block_hashes))
        return cls(revision, block_size, counts, [block_hashes[count - 1] for count in counts])


def _marks(num_blocks: int) -> list[int]:
    marks: list[int] = []
    start, step = 0, 1
    while start < num_blocks:
        end = 2 * STEPS * step
        marks += range(start + step, min(end, num_blocks) + 1, step)
        start, step = end, 2 * step
    return marks if not marks or marks[-1] == num_blocks else [*marks, num_blocks]
