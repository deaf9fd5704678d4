"""What every test folder may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tandem import garbage, telemetry

os.environ.setdefault("OMP_NUM_THREADS", "1")

garbage.starting()  # test files import much

settings.register_profile("guard", max_examples=1000)  # see tests/fuzzing.py

telemetry.set_up("tests", "tests", "warning")

ROOT = Path(__file__).parents[1]


def pytest_collection_finish() -> None:
    garbage.settled()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "models" / "demo" / "target"
