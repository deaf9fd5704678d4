"""Compares the CPU time of a commit (base) with that of the working tree (head), and exits 1 where it has grown.

    python -m benchmarks.regress            against the last release
    python -m benchmarks.regress COMMIT

1. write the commit's files to a temporary folder
2. measure by measure (`measures` names them), each with its share of the time: start both trees, then let them take
   turns: base, head; head, base; a turn is short, so that both meet the same seconds of a busy machine
3. print each figure of both trees, and the median of head / base over the rounds; above 1.10 the exit status is 1
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.regress.comparison import Compared, table, verdict
from benchmarks.regress.measures import MEASURES, Unmeasured
from tests.release import ROOT, last_release

ROUNDS, SECONDS = 9, 260.0
SIDES = ("base", "head")


def main() -> None:
    options, console, began = _options(), Console(soft_wrap=True), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # What runs is stopped on the way out.
    rows: list[Compared] = []
    with tempfile.TemporaryDirectory(prefix="tandem-regress-") as folder:
        trees = {"base": _written(options.commit, Path(folder)), "head": ROOT}
        for number, measure in enumerate(MEASURES, 1):
            rows += _rows(measure, trees, began + options.seconds * number / len(MEASURES), options.rounds)
    status, why = verdict(rows)
    console.print(table(rows))
    console.print(f"base is {options.commit}; {time.monotonic() - began:.0f} s in all; {why}", markup=False)
    sys.exit(status)


def _rows(measure: str, trees: Mapping[str, Path], end: float, rounds: int) -> list[Compared]:
    """The figures of one measure; what one tree cannot do, the other does once."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    missing, took = "", 0.0
    with ExitStack() as stack:
        turns = {}
        for side in SIDES:
            try:
                turns[side] = stack.enter_context(MEASURES[measure](trees[side]))
            except Unmeasured as error:
                missing += f"{side}: {error} "
        for number in range(1 if missing else rounds):
            began = time.monotonic()
            if number and began + took > end:
                break
            for side in reversed(turns) if number % 2 else turns:
                try:
                    found[side].append(turns[side]())
                except Unmeasured as error:
                    return _compared(measure, found, f"{side}: {error}")
            took = max(took, time.monotonic() - began)
    return _compared(measure, found, missing)


def _compared(measure: str, found: Mapping[str, Sequence[dict[str, float]]], missing: str) -> list[Compared]:
    names = dict.fromkeys(name for side in SIDES for figures in found[side] for name in figures)
    rows = []
    for name in names or [measure]:
        base, head = ([one[name] for one in found[side] if name in one] for side in SIDES)
        rows.append(Compared(name, base, head, missing or "not a figure of both"))
    return rows


def _written(commit: str, folder: Path) -> Path:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"{commit}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regress", description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default=last_release()[1], help="the base; the last release if not given")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="most")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no further turn begins that would end later")
    return parser.parse_args()


if __name__ == "__main__":
    main()
