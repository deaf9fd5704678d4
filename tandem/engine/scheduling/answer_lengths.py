"""The expected length of an answer, learned from earlier answers."""

from __future__ import annotations

from math import ceil

WEIGHT = 1 / 32
GUESS_COUNTS = 4  # the number of answers that the initial guess weighs as much as


class AnswerLengths:
    """A running mean of the lengths of ended answers. `guess`: the length assumed before any answer has ended."""

    def __init__(self, guess: int) -> None:
        self._mean, self._count = float(guess), GUESS_COUNTS

    @property
    def likely_left(self) -> int:
        """Tokens to reserve for an answer: half the mean length, which answers under way hold on average."""
        return max(1, ceil(self._mean / 2))

    def ended(self, num_tokens: int) -> None:
        self._count += 1
        self._mean += max(WEIGHT, 1 / self._count) * (num_tokens - self._mean)
