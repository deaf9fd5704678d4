"""The report of `python -m benchmarks.regress`: what fails it, and what it says."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.regress.comparison import Compared, table, verdict

pytestmark = pytest.mark.fast
SAME = Compared("a step", (2.0, 2.1), (2.1, 2.0))
SLOWER = Compared("a request", (1.0, 1.1, 1.3), (1.2, 1.4, 1.3))
NEWER = Compared("a new thing", (), (3.0,), "base: no such option")
BROKEN = Compared("a prefill", (3.0,), (), "head: not ready within 60 s")


def printed(*rows: Compared) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(rows))
    return capture.get()


def test_a_row_above_the_limit_fails_and_is_named() -> None:
    status, why = verdict([SAME, SLOWER])
    assert status == 1
    assert "a request (1.20)" in why
    assert "a step" not in why


def test_the_median_of_the_rounds_counts_and_their_spread_is_shown() -> None:
    line = next(line for line in printed(SAME, SLOWER).splitlines() if "a request" in line)
    assert line.split("│")[1:-1] == [" a request ", " 1.10 ", " 1.30 ", " 1.20  ", " 1.00 - 1.27 (3) "]


def test_what_costs_as_much_as_before_passes() -> None:
    assert verdict([SAME, Compared("a token", (1.0,), (1.1,))])[0] == 0


def test_what_only_the_base_lacks_is_shown_with_its_reason_and_passes() -> None:
    assert verdict([SAME, NEWER])[0] == 0
    assert "base: no such option" in printed(NEWER)


def test_what_the_head_lacks_fails() -> None:
    status, why = verdict([BROKEN])
    assert status == 1
    assert "a prefill (n/a)" in why
    assert "head: not ready within 60 s" in printed(BROKEN)
