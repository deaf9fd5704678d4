from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.transfer.transports import TRANSPORTS
from tests.transfer.pair import Meet, Pair, make_pair, open_things, until
from tests.transfer.toy import ToyTransport


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test releases every descriptor, thread and shared memory."""
    before = open_things()
    yield
    assert until(lambda: open_things() == before), f"{open_things()} after, {before} before"


@pytest.fixture(params=["shm", "tcp", "memory", "toy"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "toy":
        monkeypatch.setitem(TRANSPORTS, "toy", ToyTransport)
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
