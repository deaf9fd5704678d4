"""The cost of a step by the number of its tokens, as measured."""

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
        seconds, keep = self.at_most(rows, seconds), self._forget
        count, of_rows, of_seconds, of_squares, of_products = self._sums
        self._sums = (
            count * keep + 1, of_rows * keep + rows, of_seconds * keep + seconds, of_squares * keep + rows * rows,
            of_products * keep + rows * seconds,
        )  # fmt: skip

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
        count, of_rows, of_seconds, of_squares, of_products = self._sums
        rows, seconds = of_rows / count, of_seconds / count
        spread, together = of_squares / count - rows * rows, of_products / count - rows * seconds
        guess = SHARE_PER_ROW * seconds / max(1.0, SHARE_PER_ROW * rows)
        each = (together + SURE * guess) / (spread + SURE)
        each = min(max(each, 0.0), seconds / rows)
        return seconds - each * rows, each
