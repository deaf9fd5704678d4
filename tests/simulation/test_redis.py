"""The registry on virtual time: real scripts on a real redis-server, hours in a moment, the same each time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest

from tandem.local import RedisServer
from tandem.registry import BlockReplica, ClusterView, Registry, RegistryUnavailable, Role
from tests.registry.cluster import MODEL, register_pool, worker_info, worker_load
from tests.simulation.redis import SimulatedRedis
from tests.simulation.world import Process, World

HASHES = [bytes([i]) * 16 for i in range(8)]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


def registry_of(world: World, redis: SimulatedRedis, process: Process) -> Registry:
    return Registry(redis.connection(process.name, lambda: world.random.uniform(0.0001, 0.001)))


async def reserve(registry: Registry, ttl: float) -> str:
    route = await registry.select_and_reserve(
        request_id="r", model=MODEL, prompt_tokens=40, max_new_tokens=8, prefill="require", ttl=ttl
    )
    return route.reservation_id


async def heartbeats(registry: Registry, worker: str, every: float) -> None:
    while True:
        with suppress(RegistryUnavailable):
            await registry.heartbeat(worker_info(worker, Role.DECODE), worker_load(), 4 * every)
        await asyncio.sleep(every)


def test_leases_and_reservations_end_at_the_simulated_time(server: RedisServer) -> None:
    with World(1) as world, SimulatedRedis(server.url, uuid4().hex, lambda: world.now) as redis:
        registry = registry_of(world, redis, gateway := world.process("gateway"))

        async def life() -> None:
            await register_pool(registry, ttl=3600.0)
            await reserve(registry, ttl=600.0)
            await asyncio.sleep(599.0)
            assert [w.reserved_tokens for w in await registry.workers()] == [0, 40]
            await asyncio.sleep(1.0)
            assert [w.reserved_tokens for w in await registry.workers()] == [0, 0]
            await asyncio.sleep(2995.0)
            assert len(await registry.workers()) == 2
            await asyncio.sleep(5.0)
            assert await registry.workers() == []
            assert await registry.check_integrity() == []

        world.run(gateway, life(), limit_s=4000.0)


def run_of(server: RedisServer, seed: int) -> list[tuple[Any, ...]]:
    """Two gateways, a worker, and a Redis that loses its memory."""
    with World(seed) as world, SimulatedRedis(server.url, uuid4().hex, lambda: world.now) as redis:
        worker, gateways = world.process("worker"), [world.process(f"gateway{i}") for i in range(2)]
        views = []
        for gateway in gateways:
            registry = registry_of(world, redis, gateway)
            view, replica = ClusterView(registry), BlockReplica(registry.block_feed)
            views.append((view, replica))
            gateway.spawn(view.run())
            gateway.spawn(replica.run())

        async def life() -> None:
            registry = registry_of(world, redis, worker)
            worker.create_task(heartbeats(registry, "d0", 1.0))
            await asyncio.sleep(1.0)
            for number in range(8):
                await registry.publish_blocks("d0", "d0-first", HASHES[number : number + 1], [])
                await asyncio.sleep(world.random.uniform(0, 2))
                for view, replica in views:
                    found = [w.info.worker_id for w in view.workers], replica.holders(HASHES[: number + 1])
                    world.log(number, *found)
                    assert found[0] == ["d0"]
                    assert found[1][0][0] == number + 1
            first = {worker.generation for view, _ in views for worker in view.workers}
            redis.stop()
            await asyncio.sleep(5.0)
            assert {worker.generation for view, _ in views for worker in view.workers} == first
            redis.start()
            await asyncio.sleep(5.0)
            again = {worker.generation for view, _ in views for worker in view.workers}
            assert len(again) == 1
            assert again != first
            world.log(again, [replica.holders(HASHES) for _, replica in views])
            await asyncio.sleep(60.0)

        world.run(worker, life())
        assert world.errors == []
        return world.events


def test_a_run_is_a_function_of_its_seed(server: RedisServer) -> None:
    one = run_of(server, 7)
    assert run_of(server, 7) == one
    assert run_of(server, 8) != one
    assert len(one) == 17
