"""One wrong value in Redis ends no process, and hides no other's row."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from tandem.local import RedisServer
from tandem.registry import BlockReplica, ClusterView, Registry
from tandem.registry.wire.scripts import key_prefix
from tests.registry import wrong_values
from tests.registry.cluster import eventually, viewing
from tests.registry.wrong_values import TTL, VALUES, WrittenPlace


@pytest.fixture
async def raw(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url)
    yield client
    await client.aclose()


class Refilled:
    """A registry that is as it was when it had been filled, for each wrong value."""

    def __init__(self, raw: Redis, registry: Registry, namespace: str) -> None:
        self.raw, self.registry, self.namespace = raw, registry, namespace
        self._dumped: dict[bytes, bytes] = {}

    async def fill(self) -> list[WrittenPlace]:
        """The places to try: those of one worker of each role, and of everything else."""
        await wrong_values.fill(self.registry)
        await self.raw.hset(f"{key_prefix(self.namespace)}mended", "leases", 1)
        found = await wrong_values.places(self.raw, self.namespace)
        self._dumped = {place.key: await self.raw.dump(place.key) for place in found}
        return [place for place in found if not place.key.endswith((b":d1", b":p1"))]

    async def refill(self) -> None:
        async with self.raw.pipeline(transaction=False) as pipeline:
            pipeline.delete(*await self.raw.keys(f"{{{self.namespace}}}:*"))
            for key, dumped in self._dumped.items():
                pipeline.restore(key, 0, dumped)
            await pipeline.execute()

    async def faults(self, *wrong: tuple[WrittenPlace, bytes | None]) -> list[str]:
        """Returns what goes wrong with these values there."""
        await self.refill()
        view, replica = ClusterView(self.registry), BlockReplica(self.registry.block_feed)
        await view.refresh()
        await replica.refresh()
        for place, value in wrong:
            await wrong_values.spoil(self.raw, place, value)
        found = []
        calls = wrong_values.readers(self.registry, view, replica)
        if len(wrong) == 1 and (of := wrong[0][0].key.rpartition(b":worker:")[2].decode()) in ("d0", "p0"):
            there = {worker.info.worker_id for worker in await self.registry.workers()}
            found += [] if there >= {"d0", "d1", "p0", "p1"} - {of} else [f"neighbours: {there}"]
        for name, call in [*calls.items(), *wrong_values.beats(self.registry).items()]:
            if why := await wrong_values.outcome(name, call):
                found.append(f"{name}: {why}")
        found += await self._left(view)
        return [f"{', '.join(f'{place} = {repr(value)[:20]}' for place, value in wrong)}: {fault}" for fault in found]

    async def _left(self, view: ClusterView) -> list[str]:
        """Returns what is still wrong once every worker has beaten."""
        try:
            await view.refresh()
            there = [worker.info.worker_id for worker in view.workers]
            route = await wrong_values.select(self.registry, "last")
            await self.registry.reservations.release(route.reservation_id)
        except Exception as error:
            return [f"left: {error!r}"]
        return [] if there == ["d0", "d1", "p0", "p1"] else [f"left: {there}"]


async def test_one_wrong_value_ends_no_process(raw: Redis, registry: Registry, namespace: str) -> None:
    refilled = Refilled(raw, registry, namespace)
    found = await refilled.fill()
    faults = [fault for place in found for value in VALUES for fault in await refilled.faults((place, value))]
    await refilled.refill()
    assert not faults, f"{len(faults)} of {len(found)} places:\n" + "\n".join(faults[:60])


@pytest.mark.parametrize("seed", range(3))
async def test_a_redis_that_evicts_ends_no_process(raw: Redis, registry: Registry, namespace: str, seed: int) -> None:
    random, refilled = Random(seed), Refilled(raw, registry, namespace)
    keys = [place for place in await refilled.fill() if place.field is None]
    faults = []
    for _ in range(100):
        gone = random.sample(keys, random.randrange(1, len(keys)))
        faults += await refilled.faults(*((place, None) for place in gone))
    await refilled.refill()
    assert not faults, "\n".join(faults[:20])


async def test_an_unreadable_row_is_skipped_and_said_once(raw: Redis, registry: Registry, namespace: str) -> None:
    await wrong_values.fill(registry)
    prefix = key_prefix(namespace)
    await raw.hset(f"{prefix}worker:d0", "num_blocks", b"\xff\xfe")
    await raw.hset(f"{prefix}aliases", "alias", b"[]")
    with capture_logs() as logs:
        for _ in range(3):
            assert [worker.info.worker_id for worker in await registry.workers()] == ["d1", "p0", "p1"]
            assert (await registry.aliases.all()).by_name == {}
    said = [(line["kind"], line["name"]) for line in logs if line["log_level"] == "error"]
    assert said == [("worker", "d0"), ("aliases", "alias")]
    assert registry.unreadable.found == {"worker": 1, "aliases": 1}
    assert [line.partition(":")[0] for line in registry.unreadable.report()] == ["aliases 'alias'", "worker 'd0'"]
    await registry.leases.heartbeat(*wrong_values.worker("d0"), TTL)
    assert len(await registry.workers()) == 4
    assert [line for line in registry.unreadable.report() if "worker 'd0'" in line] == []


async def test_a_redis_that_may_evict_is_said(raw: Redis, own_redis: RedisServer, namespace: str) -> None:
    async with Redis.from_url(own_redis.url) as client:
        registry = Registry.connect(own_redis.url, namespace=namespace)
        assert await registry.unreadable.evicts() == ""
        await client.config_set("maxmemory-policy", "allkeys-lru")
        with capture_logs() as logs:
            async with viewing(registry):
                await eventually(lambda: _has(logs, "noeviction"), "a warning")
        await client.acl_setuser("default", enabled=True, nopass=True, commands=["-info"])
        assert await registry.unreadable.evicts() == ""
        await registry.close()


async def _has(logs: Sequence[Mapping[str, Any]], text: str) -> bool:
    return any(text in line["event"] for line in logs)


async def test_what_is_held_for_a_lost_reservation_is_released(raw: Redis, registry: Registry, namespace: str) -> None:
    await wrong_values.fill(registry)
    (reservation,) = await raw.keys(f"{key_prefix(namespace)}reservation:*")
    await raw.delete(reservation)
    assert len((await registry.check_integrity()).violations) > 1
    await raw.zadd(f"{key_prefix(namespace)}reservations", {b"\xff": 2e15, b"": 2e15})
    for _ in wrong_values.workers():
        await registry.sweep("k:1")
    assert (await registry.check_integrity()).violations == ()


async def test_a_name_before_many_reservations_is_found_in_turn(raw: Redis, registry: Registry, namespace: str) -> None:
    prefix, names = key_prefix(namespace), [f"c/{i}" for i in range(300)]
    for name in names:
        await raw.hset(f"{prefix}reservation:{name}", "tokens", "d0")
    await raw.zadd(f"{prefix}reservations", {"nobody": 2e15, **dict.fromkeys(names, 3e15)})
    for _ in range(2):
        await registry.sweep("k:1")
    assert await raw.zscore(f"{prefix}reservations", "nobody") is None
    assert await raw.zcard(f"{prefix}reservations") == len(names)
    await raw.delete(*await raw.keys(f"{prefix}*"))  # they hold nothing, and are no whole registry


async def test_a_dead_client_whose_lease_was_lost_holds_nothing_for_long(
    raw: Redis, registry: Registry, namespace: str
) -> None:
    await wrong_values.fill(registry)
    await raw.delete(f"{key_prefix(namespace)}clients")
    await registry.sweep("k:1")
    (client,) = await raw.zrange(f"{key_prefix(namespace)}clients", 0, -1)
    await raw.zadd(f"{key_prefix(namespace)}clients", {str(client, "utf-8"): 1})  # over: nobody has renewed it
    await registry.sweep("k:1")
    assert (await registry.check_integrity()).held["reservations"] == 0


async def test_a_wrong_note_of_wrong_values_is_no_note(raw: Redis, registry: Registry, namespace: str) -> None:
    await wrong_values.fill(registry)
    await raw.hset(f"{key_prefix(namespace)}mended", mapping={"leases": b"\xff", "links": b"3", "turn": b"9" * 400})
    await registry.workers()
    assert registry.unreadable.mended == {"links": 3}
