"""The report of a comparison: one row for each figure, and the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

LIMIT = 1.10


@dataclass(frozen=True, slots=True)
class Compared:
    """A cost of both trees, one figure for each round: lower is better.

    `missing` is why a tree has no figures. A base may lack what is newer than it; a head may not.
    """

    name: str
    base: Sequence[float]
    head: Sequence[float]
    missing: str = ""

    @property
    def rounds(self) -> list[float]:
        """Returns head / base of each round, whose two turns met the same seconds of the machine."""
        return [head / base for base, head in zip(self.base, self.head, strict=False)]

    @property
    def ratio(self) -> float | None:
        return median(self.rounds) if self.rounds else None

    @property
    def failed(self) -> bool:
        return not self.head or (self.ratio is not None and self.ratio > LIMIT)

    def cells(self) -> tuple[str, ...]:
        """Returns what the table shows: the median costs, the ratio, and the lowest and highest ratio of a round."""
        costs = (f"{median(side):,.2f}" if side else "-" for side in (self.base, self.head))
        if self.ratio is None:
            return (self.name, *costs, "n/a", self.missing)
        spread = f"{min(self.rounds):.2f} - {max(self.rounds):.2f} ({len(self.rounds)})"
        return (self.name, *costs, f"{self.ratio:.2f}", spread)


def table(rows: Sequence[Compared]) -> Table:
    made = Table("CPU time", "base", "head", "ratio", "rounds")
    for row in rows:
        made.add_row(*row.cells(), style="red" if row.failed else "")
    return made


def verdict(rows: Sequence[Compared]) -> tuple[int, str]:
    """Returns the exit status, and the line that says why."""
    failed = [f"{row.name} ({'n/a' if row.ratio is None else f'{row.ratio:.2f}'})" for row in rows if row.failed]
    if failed:
        return 1, f"above {LIMIT:.2f}, or not measured of head: {', '.join(failed)}"
    return 0, f"no ratio is above {LIMIT:.2f}"
