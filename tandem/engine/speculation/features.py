"""Features: what the model computed for a position, as heads read it.

    Runner ──observe(chunks, hidden)──> Observer ──> FeatureRows of each sequence ──propose──> proposed tokens

Those of a prompt that another worker prefilled are not there, so a head begins with what this engine computes: with a
sequence's first step here, after a hand-off or a migration.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureRows:
    """Features of positions `first`, `first` + 1, …: `rows` (n, width)."""

    __slots__ = ("first", "rows")

    def __init__(self, first: int, rows: Tensor) -> None:
        self.first, self.rows = first, rows

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def put(self, start: int, rows: Tensor) -> None:
        """From `start` on they are these: what a step computes behind refused tokens takes the place of theirs."""
        if self.first <= start <= self.end:
            self.rows = torch.cat([self.rows[: start - self.first], rows])
        else:
            self.first, self.rows = start, rows.clone()

    def drop(self, count: int) -> None:
        """The first ones."""
        self.first, self.rows = self.first + count, self.rows[count:]
