from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.pair import Pair, make_pair, open_things, until


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test gives back every descriptor, thread and shared memory file."""
    before = open_things()
    yield
    assert until(lambda: open_things() == before), f"{open_things()} after, {before} before"


@pytest.fixture(params=["shm", "tcp", "memory"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(nothing_left: None, transport: str) -> Iterator[Pair]:
    pair = make_pair(transport)
    yield pair
    pair.close()
