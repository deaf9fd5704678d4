"""Tests that need a CUDA device: `pytest tests/gpu`. docs/gpu.md says what has run where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

REASON = "no CUDA device: torch.cuda.is_available() is false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))
