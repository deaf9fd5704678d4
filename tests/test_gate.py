"""The second run of what failed: which tests it repeats, and what it makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILS_ONCE = """
def test_unsteady():
    from pathlib import Path
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("beside others")
"""
FAILS_ALWAYS = """
def test_broken():
    raise AssertionError("always")
"""
FAST = """
import pytest
pytestmark = pytest.mark.fast
"""
PASSES = """
def test_steady():
    pass
"""
INI = "[pytest]\nmarkers = fast: has one try\n"


def gate(folder: Path, **files: str) -> tuple[int, list[str]]:
    """Returns the exit status and the verdicts on tests in files of these names."""
    (folder / "pytest.ini").write_text(INI, encoding="utf-8")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "tests.gate", "-p", "xdist.plugin", "-c", folder / "pytest.ini", folder],
        cwd=ROOT, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, encoding="utf-8",
        check=False, timeout=200,
    )  # fmt: skip
    verdicts = [line for line in run.stdout.splitlines() if line.startswith(("unsteady: ", "broken: "))]
    return run.returncode, verdicts


def test_what_passes_by_itself_is_named_and_passes(tmp_path: Path) -> None:
    assert gate(tmp_path, a=FAILS_ONCE, b=PASSES) == (0, ["unsteady: test_a.py::test_unsteady"])


def test_what_fails_twice_or_is_fast_fails(tmp_path: Path) -> None:
    found = gate(tmp_path, a=FAILS_ONCE, b=FAILS_ALWAYS, c=PASSES, d=FAST + FAILS_ONCE)
    verdicts = [
        "unsteady: test_a.py::test_unsteady",
        "broken: test_b.py::test_broken",
        "broken: test_d.py::test_unsteady",
    ]
    assert found == (1, verdicts)


def test_no_test_at_all_is_no_pass(tmp_path: Path) -> None:
    assert gate(tmp_path) == (5, [])
