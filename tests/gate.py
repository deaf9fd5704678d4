"""Runs tests, then runs once more, each by itself, those that failed beside others. `make test` is this.

    all of them, several at a time ──> those that failed, one at a time ──> passed now: unsteady. Failed twice: broken

Run as `python -m tests.gate [pytest's arguments]`. The exit status is 0 where nothing is broken. A test that is marked
fast starts no process and waits for nothing, so it has one try. Where very many fail, none has a second one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# So many failures are no neighbour's doing, and their repetition would take long.
MAX_REPEATED = 40


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of both runs together."""
    with TemporaryDirectory(prefix="tandem-gate-") as cache:
        return _both_runs([*arguments, f"--override-ini=cache_dir={cache}"], Path(cache))


def _both_runs(arguments: Sequence[str], cache: Path) -> int:
    status = _pytest(arguments)
    failed = _failed(cache)
    if status != pytest.ExitCode.TESTS_FAILED or not failed or len(failed) > MAX_REPEATED:
        return status
    print(f"\n{len(failed)} failed; once more without neighbours, all but those that are marked fast:", flush=True)
    again = _pytest([*arguments, "-n0", "-m", "not fast", "--last-failed", "--last-failed-no-failures=none"])
    broken = _failed(cache)
    for test in sorted(failed - broken):
        print(f"unsteady: {test}")
    for test in sorted(broken):
        print(f"broken: {test}")
    sys.stdout.flush()
    return pytest.ExitCode.TESTS_FAILED if broken else again


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed(cache: Path) -> set[str]:
    """Returns node ids of tests whose last run failed."""
    found = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(found.read_text(encoding="utf-8"))) if found.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
