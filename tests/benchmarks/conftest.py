from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.load import LoadClient
from benchmarks.models import Shape, made
from benchmarks.peers import known
from tests.marks import long_but

TINY = Shape("tiny", hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=512, max_positions=512)
TINY_MOE = replace(TINY, name="tiny-moe", head_dim=32, experts=4)
TINY_WINDOWS = replace(TINY, name="tiny-windows", layers=7, head_dim=32, window=16)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(TINY, tmp_path_factory.mktemp("models") / TINY.name)


@pytest.fixture(scope="package", params=long_but([], ["tandem", "transformers"]))
def server(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LoadClient]:
    with known()[request.param].running(tiny_model) as client:
        yield client
