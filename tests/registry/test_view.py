"""The gateway's picture of the cluster, with Redis well, gone, frozen, and back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tandem.local import RedisServer
from tandem.registry import ClusterView, Registry, RegistryUnavailable, Role
from tests.registry.cluster import MODEL, TTL, eventually, register_pool, viewing, worker_info, worker_load
from tests.registry.conftest import Connect


def ids(view: ClusterView) -> list[str]:
    return [worker.info.worker_id for worker in view.workers]


@pytest.fixture
async def own(own_redis: RedisServer) -> AsyncIterator[Registry]:
    """A client of the server that may die."""
    registry = Registry.connect(own_redis.url, timeout=30.0)
    yield registry
    await registry.close()


async def reserve(registry: Registry) -> str:
    route = await registry.reservations.select_and_reserve(
        request_id="r", model=MODEL, prompt_tokens=40, max_new_tokens=8, prefill="require", ttl=TTL
    )
    return route.reservation_id


async def heartbeat_all(registry: Registry) -> list[bool]:
    """As the workers d0 and p0 of register_pool do."""
    decode = await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), TTL)
    load = worker_load(linked=("d0-first",))
    return [decode, await registry.leases.heartbeat(worker_info("p0", Role.PREFILL), load, TTL)]


async def test_changes_are_seen_long_before_the_next_poll(registry: Registry, connect: Connect) -> None:
    async with viewing(await connect(), poll=60.0) as view:
        assert view.workers == []
        await asyncio.sleep(0.2)  # subscribed by then
        for change, expected in (
            (register_pool(registry), ["d0", "p0"]),
            (registry.leases.register(worker_info("d0", Role.DECODE, "second"), worker_load(), TTL), ["d0", "p0"]),
            (registry.leases.deregister("p0", "p0-first"), ["d0"]),
        ):
            await change

            async def arrived(expected: list[str] = expected) -> bool:
                return ids(view) == expected

            await eventually(arrived, str(expected))
        assert view.workers[0].info.incarnation == "second"


async def test_draining_links_and_being_stuck_are_changes(registry: Registry, connect: Connect) -> None:
    await register_pool(registry)
    async with viewing(await connect(), poll=60.0) as view:
        await asyncio.sleep(0.2)
        await registry.leases.heartbeat(worker_info("p0", Role.PREFILL), worker_load(linked=("x",), draining=True), TTL)

        async def seen() -> bool:
            load = view.workers[1].load
            return load.draining and load.linked == ("x",)

        await eventually(seen, "draining seen")
        await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(stuck=True), TTL)

        async def stuck() -> bool:
            return view.workers[0].load.stuck

        await eventually(stuck, "stuck seen")


async def test_load_and_silent_death_are_seen_by_polling(registry: Registry, connect: Connect) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE), worker_load(), TTL)
    async with viewing(await connect(), poll=0.05) as view:
        assert ids(view) == ["d0"]
        changed = asyncio.create_task(view.wait_changed(60.0))
        await asyncio.sleep(0)
        await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), 0.2)  # its last one
        assert await changed
        assert ids(view) == []

        async def fresh() -> bool:
            return view.age < 1.0 and not view.stale

        await eventually(fresh, "read again and again")
        assert not await view.wait_changed(0.1)


async def test_one_cancellation_ends_the_view_whatever_it_is_doing(registry: Registry, connect: Connect) -> None:
    await register_pool(registry)
    other = await connect()

    async def change(number: int) -> None:
        load = worker_load(draining=bool(number % 2))
        await other.leases.heartbeat(worker_info("d0", Role.DECODE), load, TTL)

    chance = random.Random(0)
    for _ in range(150):
        async with asyncio.timeout(30.0):
            async with viewing(registry, poll=60.0):
                changes = [asyncio.create_task(change(number)) for number in range(5)]
                for _ in range(chance.randrange(120)):
                    await asyncio.sleep(0)
            await asyncio.gather(*changes)


async def test_redis_killed_and_restarted(own: Registry, own_redis: RedisServer) -> None:
    await register_pool(own)
    reservation = await reserve(own)
    async with viewing(own, poll=0.1, stale_after=0.3, grace=60.0) as view:
        own_redis.kill()
        with pytest.raises(RegistryUnavailable):
            await own.workers()

        async def stale() -> bool:
            return view.stale

        await eventually(stale, "stale")
        assert ids(view) == ["d0", "p0"]
        with RedisServer.start(own_redis.port):

            async def fresh() -> bool:
                return not view.stale

            await eventually(fresh, "read again")
            assert ids(view) == ["d0", "p0"], "kept while they register again"
            assert await heartbeat_all(own) == [True, True]
            assert await heartbeat_all(own) == [False, False]
            assert [w.info.worker_id for w in await own.workers()] == ["d0", "p0"]
            assert not await own.reservations.release(reservation)
            assert await own.reservations.release(await reserve(own))
            assert (await own.check_integrity()).violations == ()


async def test_who_does_not_come_back_leaves_the_view(own: Registry, own_redis: RedisServer) -> None:
    await register_pool(own)
    async with viewing(own, poll=0.05, retry=0.05, grace=0.5) as view:
        own_redis.kill()
        with RedisServer.start(own_redis.port):
            await own.leases.register(worker_info("d0", Role.DECODE, "second"), worker_load(), TTL)

            async def only_the_new() -> bool:
                return [w.info.incarnation for w in view.workers] == ["second"]

            await eventually(only_the_new, "the dead prefill worker is forgotten")


async def test_redis_not_there_yet(own: Registry, own_redis: RedisServer) -> None:
    """Any start order: the view opens empty and fills."""
    own_redis.kill()
    async with viewing(own, poll=0.05, retry=0.05) as view:
        assert view.workers == []
        assert view.stale
        with RedisServer.start(own_redis.port):
            await register_pool(own)

            async def filled() -> bool:
                return ids(view) == ["d0", "p0"]

            await eventually(filled, "filled")


async def test_frozen_redis_bounds_every_call_and_keeps_nothing(own: Registry, own_redis: RedisServer) -> None:
    """Requests sent into the frozen server are carried out when it thaws, by when nobody waits for them."""
    hasty = Registry.connect(own_redis.url, timeout=0.5)
    await register_pool(own)
    held = [await reserve(own) for _ in range(3)]
    own_redis.pause()
    calls = [reserve(hasty) for _ in range(5)] + [hasty.reservations.release(r) for r in held]
    async with asyncio.timeout(30.0):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {RegistryUnavailable}
    own_redis.resume()

    async def empty() -> bool:
        with suppress(RegistryUnavailable):
            return all(w.reserved_tokens == w.reserved_blocks == 0 for w in await hasty.workers())
        return False

    await eventually(empty, "everything released")
    assert (await own.check_integrity()).violations == ()
    await hasty.close()
