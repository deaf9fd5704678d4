from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.local import RedisServer
from tests.simulation.redis import RedisStore


@pytest.fixture(scope="session")
def store() -> Iterator[RedisStore]:
    with RedisServer.start() as server, RedisStore(server.port) as store:
        yield store
