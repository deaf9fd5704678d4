"""The last release's tree, by the commit that CHANGELOG names."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RELEASED = re.compile(r"^## (?P<version>\S+), \d{4}-\d\d-\d\d, commit (?P<commit>[0-9a-f]+)$", re.MULTILINE)


@cache
def last_release() -> tuple[str, str]:
    """Its version and commit."""
    found = RELEASED.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert found, "CHANGELOG names no release with its commit"
    return found["version"], found["commit"]


def released_files(folder: Path, *paths: str) -> Path:
    """Those of the last release, in `folder`; all of them where no path is named."""
    version, commit = last_release()
    archive = subprocess.run(["git", "archive", commit, *paths], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"this clone has not the commit of {version}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder
