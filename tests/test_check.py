"""The parts of `make check`: each test that `make test` leaves out has one, and CONTRIBUTING names them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.check import HOSTILE, PARTS, part_of

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]


def test_each_path_of_a_part_is_there() -> None:
    paths = [prefix for part in PARTS.values() for prefix in part.prefixes] + [f"{path}.py" for path in HOSTILE]
    assert [path for path in paths if not (ROOT / "tests" / path).exists()] == []


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("helm/test_pods.py", "chart"), ("e2e/test_codex.py", "clients"), ("e2e/test_trace.py", "clusters"),
        ("gateway/tools/test_families.py", "rooms"), ("test_render.py", "chart"), ("test_tree.py", "rooms"),
    ],
)  # fmt: skip
def test_a_file_is_in_the_part_that_names_it_else_its_folder(path: str, part: str) -> None:
    assert part_of(path) == part


def test_contributing_says_which_change_needs_which() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(name, part.needed_for) for name, part in PARTS.items()]
