"""The cost of a step as a linear function of its number of tokens, fitted to measurements."""

from __future__ import annotations

FORGET = 0.98  # the factor by which each new observation reduces the weight of older ones
# The share of a step's seconds that a row is assumed to take. The assumption weighs as much as a variance of SURE in
# the measured numbers of rows.
SHARE_PER_ROW = 0.1
SURE = 0.3
# A step that took this many times its usual time was slow for other reasons than its tokens.
SLOW = 4.0


class StepCost:
    """Seconds of a step as base + rows * each, fitted by exponentially weighted least squares."""

    def __init__(self, forget: float = FORGET) -> None:
        self._forget = forget
        self._sums: tuple[float, ...] = (0.0,) * 5  # sums of: 1, rows, seconds, rows squared, rows * seconds

    def add(self, rows: int, seconds: float) -> None:
        seconds, keep = self.at_most(rows, seconds), self._forget
        count, of_rows, of_seconds, of_squares, of_products = self._sums
        self._sums = (
            count * keep + 1, of_rows * keep + rows, of_seconds * keep + seconds, of_squares * keep + rows * rows,
            of_products * keep + rows * seconds,
        )  # fmt: skip

    def at_most(self, rows: int, seconds: float) -> float:
        """Returns `seconds`, capped at SLOW times the usual: any time beyond that is the machine's, not the step's."""
        usual = self.at(rows)
        return min(seconds, SLOW * usual) if usual > 0 else seconds

    @property
    def known(self) -> bool:
        return self._sums[0] > 0

    def at(self, rows: int) -> float:
        base, each = self.line()
        return base + rows * each

    def line(self) -> tuple[float, float]:
        """Returns (base, each) in seconds, neither of them negative."""
        if not self.known:
            return 0.0, 0.0
        count, of_rows, of_seconds, of_squares, of_products = self._sums
        rows, seconds = of_rows / count, of_seconds / count
        spread, together = of_squares / count - rows * rows, of_products / count - rows * seconds
        guess = SHARE_PER_ROW * seconds / max(1.0, SHARE_PER_ROW * rows)
        each = (together + SURE * guess) / (spread + SURE)
        each = min(max(each, 0.0), seconds / rows)
        return seconds - each * rows, each
