"""What every test folder may use."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tandem import telemetry

os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until test files have imported what they need

settings.register_profile("guard", max_examples=1000)  # see tests/fuzzing.py

telemetry.set_up("tests", "tests", "warning")

ROOT = Path(__file__).parents[1]


def pytest_collection_finish() -> None:
    """What was imported stays. Searches go on as often as Python has them, for tests leave engines behind."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "models" / "demo" / "target"
