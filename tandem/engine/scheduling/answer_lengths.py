"""How long answers turn out, as far as it is known before they are written."""

from __future__ import annotations

from math import ceil

WEIGHT = 1 / 32
GUESS_COUNTS = 4  # as so many answers


class AnswerLengths:
    """Learns from answers that have ended. `guess`: how long one is before any has."""

    def __init__(self, guess: int) -> None:
        self._mean, self._count = float(guess), GUESS_COUNTS

    @property
    def likely_left(self) -> int:
        """Tokens to keep room for in an answer: half its usual length, as much as those under way hold on average."""
        return max(1, ceil(self._mean / 2))

    def ended(self, num_tokens: int) -> None:
        self._count += 1
        self._mean += max(WEIGHT, 1 / self._count) * (num_tokens - self._mean)
