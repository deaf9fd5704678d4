from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.local import RedisServer
from tests.simulation.redis import Store


@pytest.fixture(scope="session")
def store() -> Iterator[Store]:
    with RedisServer.start() as server, Store(server.port) as store:
        yield store
