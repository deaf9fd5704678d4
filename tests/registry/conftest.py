from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from tandem.local import RedisServer
from tandem.registry import Registry

Connect = Callable[[], Awaitable[Registry]]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server that the test may kill or freeze."""
    with RedisServer.start() as server:
        yield server
        server.resume()


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


@pytest.fixture
async def connect(redis_server: RedisServer, namespace: str) -> AsyncIterator[Connect]:
    """Makes clients of one registry; afterwards its books must balance."""
    clients: list[Registry] = []

    async def make() -> Registry:
        clients.append(Registry.connect(redis_server.url, namespace=namespace, timeout=30.0))
        return clients[-1]

    yield make
    assert (await (await make()).check_integrity()).violations == ()
    for client in clients:
        await client.close()


@pytest.fixture
async def registry(connect: Connect) -> Registry:
    return await connect()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """The server itself, to look at keys and to move their time."""
    client = Redis.from_url(redis_server.url, decode_responses=True)
    yield client
    await client.aclose()
