"""What a step costs by the number of its tokens, as measured."""

from __future__ import annotations

FORGET = 0.98  # what an observation is worth after the next one
SHARE_PER_ROW = 0.1  # of a step's seconds a row takes, until measured; as sure as SURE squared rows of spread
SURE = 0.3
# A step that took so many times as long as others of its size did not do so for its tokens.
SLOW = 4.0


class StepCost:
    """base + rows * each, by least squares that forget."""

    def __init__(self, forget: float = FORGET) -> None:
        self._forget = forget
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, rows, seconds, rows squared, rows * seconds

    def add(self, rows: int, seconds: float) -> None:
        seconds = self.at_most(rows, seconds)
        new = (1, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(old * self._forget + value for old, value in zip(self._sums, new, strict=True))

    def at_most(self, rows: int, seconds: float) -> float:
        """`seconds`, without what the machine and not the step took."""
        usual = self.at(rows)
        return min(seconds, SLOW * usual) if usual > 0 else seconds

    @property
    def known(self) -> bool:
        return self._sums[0] > 0

    def at(self, rows: int) -> float:
        base, each = self.line()
        return base + rows * each

    def line(self) -> tuple[float, float]:
        """(base, each), none of them negative."""
        if not self.known:
            return 0.0, 0.0
        rows, seconds, rows_squared, product = (value / self._sums[0] for value in self._sums[1:])
        spread, together = rows_squared - rows * rows, product - rows * seconds
        guess = SHARE_PER_ROW * seconds / max(1.0, SHARE_PER_ROW * rows)
        each = (together + SURE * guess) / (spread + SURE)
        each = min(max(each, 0.0), seconds / rows)
        return seconds - each * rows, each
