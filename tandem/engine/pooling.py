"""Embeddings: a prompt's hidden states pooled to one vector while the prompt's chunks are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.checkpoints import PoolingRule, read_pooling
from tandem.engine.types import EngineConfig


class Poolings:
    """Makes poolings by the rule in the model's folder."""

    def __init__(self, config: EngineConfig, hidden_size: int) -> None:
        self._folder, self._is_null, self._hidden_size = config.model_path, config.null is not None, hidden_size
        self._rule: PoolingRule | None = None  # read on first use

    def pooling(self, dimensions: int) -> StatePooling:
        """Returns a new pooling of `dimensions` numbers, 0 for all.

        Raises ValueError if the model gives no such one.
        """
        if self._is_null:
            raise ValueError("embedding: the null engine has no hidden states")
        if not 0 <= dimensions <= self._hidden_size:
            raise ValueError(f"dimensions: must be between 1 and {self._hidden_size}, got {dimensions}")
        self._rule = self._rule or read_pooling(self._folder)
        return StatePooling(self._rule, dimensions)


class StatePooling:
    """Pools a prompt's hidden states by `rule`. `dimensions`: how many of the vector's numbers to keep, 0 for all."""

    def __init__(self, rule: PoolingRule, dimensions: int) -> None:
        self._rule, self._dimensions = rule, dimensions
        self.reads_all = rule.kind != "last"
        self._sum: Tensor | None = None
        self._count = 0

    def take(self, start: int, rows: Tensor, normed: Callable[[Tensor], Tensor]) -> None:
        """Adds the hidden states `rows` of the tokens from `start` on; 0 begins again, as after a preemption."""
        if self._rule.kind == "last":
            self._sum, self._count = normed(rows[-1:]).float()[0], 1
        elif self._rule.kind == "cls":
            if start == 0:
                self._sum, self._count = normed(rows[:1]).float()[0], 1
        else:
            added = normed(rows).float().sum(0)
            self._sum = added if start == 0 or self._sum is None else self._sum + added
            self._count = len(rows) + (self._count if start else 0)

    def vector(self) -> list[float]:
        assert self._sum is not None
        found = self._sum / self._count
        if self._dimensions:
            found = found[: self._dimensions]
        if self._rule.normalizes:
            found = torch.nn.functional.normalize(found, dim=0)
        return found.tolist()
