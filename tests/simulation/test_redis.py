"""The registry's real Lua on a real redis-server, at simulated times, over connections that break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest

from tandem.registry import BlockReplica, ClusterView, Registry, RegistryUnavailable, Role
from tests.registry.cluster import MODEL, register_pool, worker_info, worker_load
from tests.simulation.network import SimulatedNetwork
from tests.simulation.redis import RedisClient, RedisStore, SimulatedRedis
from tests.simulation.world import Process, World

TIMEOUT_S = 0.5


class Setup:
    """A Redis, a process, and the registry as that process sees it."""

    def __init__(self, world: World, store: RedisStore) -> None:
        self.world = world
        self.network = SimulatedNetwork(world)
        self.process = world.process("one")
        self.redis = SimulatedRedis(self.network, store)
        self.registry = self.connect(self.process)

    def connect(self, process: Process) -> Registry:
        return Registry(RedisClient(self.network, process, "test", TIMEOUT_S, process.name))

    def run(self, work: Any) -> Any:
        result = self.world.run(self.process, work, limit_s=200)
        assert self.world.errors == []
        return result


@pytest.fixture
def setup(store: RedisStore) -> Any:
    with World(1) as world:
        yield Setup(world, store)


def test_leases_end_by_simulated_time(setup: Setup) -> None:
    async def work() -> None:
        await setup.registry.leases.register(worker_info("d0", Role.DECODE), worker_load(), ttl=30.0)
        await asyncio.sleep(29.9)
        assert len(await setup.registry.workers()) == 1
        await asyncio.sleep(0.2)
        await setup.registry.sweep()
        assert await setup.registry.workers() == []

    setup.run(work())


def test_views_and_replicas_follow(setup: Setup) -> None:
    async def work() -> None:
        view, replica = ClusterView(setup.registry), BlockReplica(setup.registry.block_feed)
        tasks = [asyncio.create_task(view.run()), asyncio.create_task(replica.run())]
        await asyncio.sleep(0.1)
        await register_pool(setup.registry)
        await setup.registry.leases.publish_blocks("d0", "d0-first", [b"h" * 16], [])
        await asyncio.sleep(0.05)  # neither has polled
        assert [worker.info.worker_id for worker in view.workers] == ["d0", "p0"]
        assert len(replica) == 1
        for task in tasks:
            task.cancel()

    setup.run(work())


FAULTS: dict[str, Callable[[Setup], None]] = {
    "killed": lambda setup: setup.redis.process.kill(),
    "paused": lambda setup: setup.redis.process.pause(),
    "slow": lambda setup: setattr(setup.redis, "slowness_s", 1.0),
    "cut off": lambda setup: setup.network.cut(setup.process, setup.redis.process),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_redis_that_does_not_answer_is_unavailable_in_time_and_comes_back(setup: Setup, fault: str) -> None:
    async def work() -> None:
        await register_pool(setup.registry)
        FAULTS[fault](setup)
        for _ in range(3):
            began = setup.process.time()
            with pytest.raises(RegistryUnavailable):
                await setup.registry.workers()
            assert setup.process.time() - began < TIMEOUT_S + 0.01
        setup.redis.slowness_s = 0.0
        setup.redis.process.kill()
        setup.redis.start(empty=False)
        await asyncio.sleep(0.1)
        assert len(await setup.registry.workers()) == 2

    setup.run(work())


def test_an_emptied_redis_is_empty(setup: Setup) -> None:
    async def work() -> None:
        await register_pool(setup.registry)
        setup.redis.empty()
        assert await setup.registry.workers() == []

    setup.run(work())


def test_a_subscription_says_that_its_connection_was_lost(setup: Setup) -> None:
    async def work() -> None:
        async with setup.registry.changes() as changes:
            await register_pool(setup.registry)
            assert await changes.wait(1.0)
            assert not await changes.wait(1.0)
            setup.redis.process.kill()
            with pytest.raises(RegistryUnavailable):
                await changes.wait(1.0)

    setup.run(work())


HASHES = [bytes([i]) * 16 for i in range(8)]


def generations_of(views: Iterable[ClusterView]) -> set[str]:
    return {worker.generation for view in views for worker in view.workers}


def events_of(store: RedisStore, seed: int) -> list[tuple[Any, ...]]:
    """Two gateways follow a worker, over a Redis that loses its memory."""
    with World(seed) as world:
        setup = Setup(world, store)
        seen = []
        for gateway in (world.process("gateway0"), world.process("gateway1")):
            registry = setup.connect(gateway)
            view, replica = ClusterView(registry), BlockReplica(registry.block_feed)
            seen.append((view, replica))
            gateway.spawn(view.run())
            gateway.spawn(replica.run())

        async def heartbeats() -> None:
            while True:
                with suppress(RegistryUnavailable):
                    await setup.registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), 4.0)
                await asyncio.sleep(1.0)

        async def life() -> None:
            beating = asyncio.create_task(heartbeats())
            await asyncio.sleep(1.0)
            for number in range(len(HASHES)):
                await setup.registry.leases.publish_blocks("d0", "d0-first", HASHES[number : number + 1], [])
                await asyncio.sleep(world.random.uniform(0.01, 2))
                for view, replica in seen:
                    world.log([worker.info.worker_id for worker in view.workers], replica.holders(HASHES))
                    assert replica.holders(HASHES[: number + 1])[0][0] == number + 1
            generations = generations_of(view for view, _ in seen)
            setup.redis.process.kill()
            await asyncio.sleep(5.0)
            assert generations_of(view for view, _ in seen) == generations
            setup.redis.start(empty=True)
            await asyncio.sleep(5.0)
            again = generations_of(view for view, _ in seen)
            assert len(again - generations) == len(again) == 1
            world.log(sorted(again))
            beating.cancel()

        setup.run(life())
        return world.events


def test_a_run_is_a_function_of_its_seed(store: RedisStore) -> None:
    one = events_of(store, 7)
    assert events_of(store, 7) == one
    assert events_of(store, 8) != one


def test_reservations_end_by_simulated_time(setup: Setup) -> None:
    async def work() -> None:
        await register_pool(setup.registry, ttl=3600.0)
        await setup.registry.reservations.select_and_reserve(
            request_id="r", model=MODEL, prompt_tokens=40, max_new_tokens=8, prefill="require", ttl=60.0
        )
        await asyncio.sleep(59.0)
        assert [worker.reserved_tokens for worker in await setup.registry.workers()] == [0, 40]
        await asyncio.sleep(1.0)
        assert [worker.reserved_tokens for worker in await setup.registry.workers()] == [0, 0]
        assert (await setup.registry.check_integrity()).violations == ()

    setup.run(work())
