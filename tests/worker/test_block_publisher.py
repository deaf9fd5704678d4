"""The registry comes to know what an engine's prefix cache holds, through breaks of the connection too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis

from tandem.block_hash import block_hashes, root_hash
from tandem.engine import BlockStored, Engine
from tandem.local import RedisServer
from tandem.registry import Registry, Role
from tandem.worker import EngineThread
from tandem.worker.kv.publisher import BATCH, BlockPublisher
from tests.registry.cluster import eventually, worker_info, worker_load
from tests.worker.conftest import request


@asynccontextmanager
async def publishing(engine: Engine, registry: Registry) -> AsyncIterator[EngineThread]:
    """A worker p0 whose engine runs and whose blocks are published."""
    await registry.leases.register(worker_info("p0", Role.PREFILL), worker_load(), 30)
    thread = EngineThread(engine)
    thread.start(lambda outputs: None, lambda error: None)
    task = asyncio.create_task(BlockPublisher(thread, registry.leases, "p0", "p0-first").run())
    try:
        yield thread
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        thread.close()


def hashes_of(engine: Engine, prompt_tokens: int) -> list[bytes]:
    layout = engine.layout
    root = root_hash(layout.model, layout.revision)
    return block_hashes(root, range(1, prompt_tokens + 1), layout.block_size)


async def test_a_gateways_hashes_are_the_engines(engine_of: Callable[[int], Engine]) -> None:
    engine = engine_of(16)
    with RedisServer.start() as server:
        registry = Registry.connect(server.url, timeout=30.0)
        async with publishing(engine, registry) as thread:
            await thread.call(lambda engine: engine.add(request("a", prompt=50, max_tokens=1)))

            async def published() -> bool:
                return await registry.locate(hashes_of(engine, 50)) == [["p0"]] * 3

            await eventually(published, "all three full blocks are known")
        await registry.close()


async def test_changes_of_a_time_when_redis_refuses_are_published_later(engine_of: Callable[[int], Engine]) -> None:
    """Shorter than the lease, so the registry forgets nothing and nothing is published whole."""
    engine = engine_of(16)
    with RedisServer.start() as server:
        registry = Registry.connect(server.url, timeout=30.0)
        async with Redis.from_url(server.url) as redis, publishing(engine, registry) as thread:
            await redis.config_set("maxmemory", 1)  # refuses every write
            await thread.call(lambda engine: engine.add(request("a", prompt=50, max_tokens=1)))
            await asyncio.sleep(1.0)
            await redis.config_set("maxmemory", 0)

            async def published() -> bool:
                return await registry.locate(hashes_of(engine, 50)) == [["p0"]] * 3

            await eventually(published, "published when Redis takes writes again")
        await registry.close()


async def test_thousands_of_blocks_are_published_in_batches(engine_of: Callable[[int], Engine]) -> None:
    hashes = [number.to_bytes(16, "big") for number in range(2 * BATCH + 1)]
    engine = engine_of(16)
    with RedisServer.start() as server:
        registry = Registry.connect(server.url, timeout=30.0)
        info = worker_info("p0", Role.PREFILL, num_blocks=len(hashes))
        await registry.leases.register(info, worker_load(), 30)
        publisher = BlockPublisher(EngineThread(engine), registry.leases, "p0", "p0-first")
        publisher.note([BlockStored(tuple(hashes), b"")])
        await publisher.publish()
        assert await registry.locate(hashes) == [["p0"]] * len(hashes)
        assert (await registry.block_feed.heads()).workers["p0"].number == 3
        await registry.close()
