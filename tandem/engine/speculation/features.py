"""Features: the model's outputs for a position, in the form that heads read.

    Runner ──observe(chunks, hidden)──> Observer ──> FeatureRows of each sequence ──propose──> proposed tokens

Features of a prompt that another worker prefilled are missing. So after a hand-off or a migration a head begins with
the sequence's first step on this engine.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureRows:
    """The features `rows` (n, width) of positions `first`, `first` + 1, …"""

    __slots__ = ("first", "rows")

    def __init__(self, first: int, rows: Tensor) -> None:
        self.first, self.rows = first, rows

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def put(self, start: int, rows: Tensor) -> None:
        """Replaces the features from `start` on: new ones overwrite those of refused tokens."""
        if self.first <= start <= self.end:
            self.rows = torch.cat([self.rows[: start - self.first], rows])
        else:
            self.first, self.rows = start, rows.clone()

    def drop(self, count: int) -> None:
        """Drops the first `count` features."""
        self.first, self.rows = self.first + count, self.rows[count:]
