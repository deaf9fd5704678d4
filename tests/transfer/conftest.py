from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.transfer.pair import Meet, Pair, make_pair, open_things, until


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
def meet(nothing_left: None) -> Iterator[Meet]:
    """Makes pairs, and closes them however the test ends."""
    pairs: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        pairs.append(make_pair(*args, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(meet: Meet, transport: str) -> Pair:
    return meet(transport)
