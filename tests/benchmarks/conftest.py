from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load import LoadClient
from benchmarks.models import Shape, made
from benchmarks.peers import known
from tests.marks import long_but

TINY = Shape("tiny", hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=512, max_positions=512)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(TINY, tmp_path_factory.mktemp("models") / TINY.name)


@pytest.fixture(scope="package", params=long_but([], ["tandem", "transformers"]))
def server(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LoadClient]:
    with known()[request.param].running(tiny_model) as client:
        yield client
