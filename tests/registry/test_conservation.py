"""Reservations are released exactly: under concurrency, cancellation, expiry, death, in any order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from tandem.local import RedisServer
from tandem.registry import GatewayAddress, Limits, NoWorkers, Registry, Role
from tandem.registry.wire.connection import RedisConnection
from tandem.registry.wire.resp import Argument
from tandem.registry.wire.scripts import key_prefix
from tests.registry.cluster import (
    BLOCK_SIZE,
    MODEL,
    TTL,
    end_client_leases,
    eventually,
    register_pool,
    worker_info,
    worker_load,
)
from tests.registry.conftest import Connect

CLIENTS = 4
TASKS = 40
ROUNDS = 10


async def reserve(registry: Registry, tokens: int = 40, ttl: float = TTL, prefill: str = "require") -> str:
    route = await registry.reservations.select_and_reserve(
        request_id="r", model=MODEL, prompt_tokens=tokens, max_new_tokens=8, prefill=prefill, ttl=ttl  # type: ignore[arg-type]
    )  # fmt: skip
    return route.reservation_id


async def totals(registry: Registry) -> tuple[int, int]:
    workers = await registry.workers()
    return sum(w.reserved_tokens for w in workers), sum(w.reserved_blocks for w in workers)


async def test_many_clients_reserve_and_release_at_once(registry: Registry, connect: Connect) -> None:
    await register_pool(registry, prefill=2, decode=3)
    clients = [await connect() for _ in range(CLIENTS)]

    async def request(number: int) -> int:
        chance, freed = random.Random(number), 0
        for _ in range(ROUNDS):
            one, other = chance.sample(clients, 2)
            reservation = await reserve(one, tokens=chance.randrange(1, 400))
            if chance.random() < 0.5:
                assert await other.reservations.release(reservation, prefill_done_only=True)
            freed += sum(
                await asyncio.gather(one.reservations.release(reservation), other.reservations.release(reservation))
            )
        return freed

    freed = await asyncio.gather(*(request(number) for number in range(TASKS)))
    assert sum(freed) == TASKS * ROUNDS
    assert await totals(registry) == (0, 0)


async def test_counters_equal_what_is_outstanding(registry: Registry) -> None:
    await register_pool(registry, prefill=2, decode=2)
    reservations = await asyncio.gather(*(reserve(registry, tokens=40) for _ in range(50)))
    assert len(set(reservations)) == 50
    assert await totals(registry) == (50 * 40, 50 * 3)
    await asyncio.gather(*(registry.reservations.release(r, prefill_done_only=True) for r in reservations[:20]))
    await asyncio.gather(*(registry.reservations.release(r) for r in reservations[40:]))
    assert await totals(registry) == (20 * 40, 40 * 3)


async def test_a_reservation_ends_by_itself(registry: Registry) -> None:
    await register_pool(registry)
    reservation = await reserve(registry, ttl=0.1)

    async def back() -> bool:
        return await totals(registry) == (0, 0)

    await eventually(back, "reservation expired")
    assert not await registry.reservations.release(reservation)


async def test_reservations_of_a_dead_client_end_with_its_lease(
    registry: Registry, redis: Redis, redis_server: RedisServer, namespace: str
) -> None:
    await register_pool(registry)
    other = await reserve(registry)
    dead = Registry.connect(redis_server.url, namespace=namespace, client_lease_s=6.0, timeout=30.0)
    dead.gateways.announce(lambda: (GatewayAddress("m", "10.0.0.1:8000", "10.0.0.1:50051"), {}))
    for _ in range(3):
        await reserve(dead)
    holding = asyncio.create_task(dead.gateways.hold())
    ends = dict(await redis.zrange(clients := f"{key_prefix(namespace)}clients", 0, -1, withscores=True))

    async def renewed() -> bool:
        now = dict(await redis.zrange(clients, 0, -1, withscores=True))
        return len(now) == 1 and all(now[client] > ends.get(client, 0) + 1000 for client in now)

    await eventually(renewed, "the lease is renewed")
    assert await totals(registry) == (4 * 40, 4 * 3), "held as long as it is renewed"
    assert await registry.gateways.live() == [GatewayAddress("m", "10.0.0.1:8000", "10.0.0.1:50051")]
    holding.cancel()
    await end_client_leases(redis, namespace)
    assert await totals(registry) == (40, 3)
    assert await registry.gateways.live() == []
    await reserve(dead)
    assert await totals(registry) == (80, 6), "a client that comes back reserves anew"
    await dead.close()
    assert await totals(registry) == (40, 3), "a client that closes releases everything"
    await registry.reservations.release(other)


async def test_no_call_releases_all_that_a_busy_dead_client_had(
    registry: Registry, redis: Redis, redis_server: RedisServer, namespace: str
) -> None:
    """It would keep every gateway waiting: portions of 256, by each call."""
    await register_pool(registry)
    dead = Registry.connect(redis_server.url, namespace=namespace, client_lease_s=30.0, timeout=30.0)
    await asyncio.gather(*(reserve(dead) for _ in range(1000)))
    kept = await reserve(registry)
    await end_client_leases(redis, namespace)
    left = [(await totals(registry))[0] // 40 for _ in range(5)]
    assert left == [745, 489, 233, 1, 1]
    assert (await registry.check_integrity()).violations == ()
    await registry.reservations.release(kept)
    assert not [key async for key in redis.scan_iter(f"{key_prefix(namespace)}reserved:*")]
    await dead.close()


async def test_sweeping_finds_what_no_call_has_found(registry: Registry, redis: Redis, namespace: str) -> None:
    await register_pool(registry)
    await registry.leases.publish_blocks("d0", "d0-first", [b"a" * 16, b"b" * 16], [])
    for _ in range(600):
        await reserve(registry)
    keys = key_prefix(namespace)
    members = [member async for member, _ in redis.zscan_iter(keys + "reservations")]
    await redis.zadd(keys + "reservations", dict.fromkeys(members, 1))
    assert (await registry.sweep()).reservations == 600
    assert await totals(registry) == (0, 0)
    await redis.zadd(keys + "leases", {"d0": 1})
    swept = await registry.sweep()
    assert (swept.leases, swept.blocks) == (1, 2)
    assert await registry.sweep() == type(swept)(0, 0, 0)


async def test_many_sweepers_sweep_once(registry: Registry, connect: Connect, redis: Redis, namespace: str) -> None:
    await register_pool(registry, decode=4)
    await redis.zadd(f"{key_prefix(namespace)}leases", {"d0": 1, "d1": 1, "d2": 1})
    sweepers = [await connect() for _ in range(CLIENTS)]
    swept = await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    assert sum(s.leases for s in swept) == 3
    assert [w.info.worker_id for w in await registry.workers()] == ["d3", "p0"]


async def test_a_cancelled_call_keeps_nothing(registry: Registry) -> None:
    """Whenever the caller goes away: before the request is sent, on its way, or just before the answer is read."""
    await register_pool(registry)
    for i in range(60):
        call = asyncio.create_task(reserve(registry))
        await asyncio.sleep(i * 2e-5)
        call.cancel()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(outcome, str):
            await registry.reservations.release(outcome)

    async def back() -> bool:
        return await totals(registry) == (0, 0)

    await eventually(back, "released")


async def test_a_call_sent_twice_reserves_once_and_one_given_up_never(
    registry: Registry, redis_server: RedisServer, namespace: str
) -> None:
    """A broken connection may lose the answer, so the call is sent again, or carry out a call that was given up."""
    await register_pool(registry)
    wire = RedisConnection(redis_server.url, namespace, 2.0)
    epoch = (await registry.snapshot()).epoch
    wanted = (MODEL, 40, 8, "require", 1000, "[]", "", 1, "", "", "-", 0, 0)
    for _ in range(2):
        _, (status, *_) = await wire.call("select", epoch, "", 0, 0, "twice", *wanted)
        assert status == "ok"
    assert await totals(registry) == (40, 3)
    await wire.call("abandon", "twice")
    await wire.call("abandon", "late")
    _, (status, *_) = await wire.call("select", epoch, "", 0, 0, "late", *wanted)
    assert status == "none"
    assert await totals(registry) == (0, 0)
    await wire.close()


class LateConnection(RedisConnection):
    """The first `name` that Redis carries out seems lost, so it goes out again; `late` is when it arrives after all."""

    def __init__(self, redis: RedisServer, namespace: str, name: str) -> None:
        super().__init__(redis.url, namespace, 2.0)
        self.late: Callable[[], Awaitable[Any]] | None = None
        self._name = name
        self._lost = 0

    @property
    def lines(self) -> int:
        return super().lines + self._lost

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        call = partial(super().call, name, *arguments, binary=binary)
        answer = await call()
        if name == self._name and self.late is None and answer[0] == arguments[0]:
            self._lost, self.late = 1, call
            return await call()
        return answer


async def test_a_choice_that_arrives_behind_its_release_reserves_nothing(
    registry: Registry, redis_server: RedisServer, namespace: str
) -> None:
    await register_pool(registry)
    connection = LateConnection(redis_server, namespace, "select")
    gateway = Registry(connection)
    assert await gateway.reservations.release(await reserve(gateway))
    assert connection.late is not None
    _, (status, why, *_) = await connection.late()
    assert (status, why) == ("none", "the reservation was given up")
    assert await totals(registry) == (0, 0)
    assert not gateway.reservations._doubtful
    await gateway.close()


async def test_a_taking_that_arrives_behind_its_settlement_takes_nothing(
    registry: Registry, redis_server: RedisServer, namespace: str
) -> None:
    connection = LateConnection(redis_server, namespace, "take")
    gateway, limits = Registry(connection), Limits(concurrent_requests=1, tokens_per_minute=100)
    taken = await gateway.limits.take("t", limits, request_id="r", tokens=60, cost=0.0, ttl=60.0)
    assert taken.tokens_left == 40
    assert connection.late is not None
    _, lacks, *again = await connection.late()
    assert lacks == ""
    assert again[3] >= 40, "taken once"
    await gateway.limits.settle(taken, 10, 10, 0.0)
    await connection.late()
    after = await registry.limits.take("t", limits, request_id="r2", tokens=60, cost=0.0, ttl=60.0)
    assert not after.lacks
    await registry.limits.settle(after, 0, 0, 0.0)
    await gateway.close()


async def test_what_was_asked_before_redis_lost_its_memory_holds_nothing_after(
    redis: Redis, redis_server: RedisServer, registry: Registry, namespace: str
) -> None:
    """That they were released is lost, too."""
    await register_pool(registry)
    selects, takes = (LateConnection(redis_server, namespace, name) for name in ("select", "take"))
    chooser, taker, limits = Registry(selects), Registry(takes), Limits(concurrent_requests=1)
    await chooser.reservations.release(await reserve(chooser))
    taken = await taker.limits.take("t", limits, request_id="r", tokens=60, cost=0.0, ttl=60.0)
    await taker.limits.settle(taken, 10, 10, 0.0)
    await redis.delete(*await redis.keys(f"{{{namespace}}}:*"))
    await register_pool(registry)
    assert selects.late is not None
    assert takes.late is not None
    epoch = (await registry.snapshot()).epoch
    assert [await selects.late(), await takes.late()] == [[epoch], [epoch]]
    assert await totals(registry) == (0, 0)
    for client in (chooser, taker):  # and are served at once
        assert await client.reservations.release(await reserve(client))
        again = await client.limits.take("t", limits, request_id="r", tokens=60, cost=0.0, ttl=60.0)
        assert not again.lacks
        await client.limits.settle(again, 10, 10, 0.0)
        await client.close()


async def test_the_check_sees_a_wrong_counter(registry: Registry, redis: Redis, namespace: str) -> None:
    await register_pool(registry)
    await reserve(registry)
    counter = f"{key_prefix(namespace)}rows:decode:{MODEL}"
    await redis.bitfield(counter).incrby("i64", "#1", 1).execute()
    assert (await registry.check_integrity()).violations == ("d0 counts 4 blocks and holds 3",)
    await redis.bitfield(counter).incrby("i64", "#1", -1).execute()
    assert (await registry.check_integrity()).violations == ()


Part = tuple[str, int]
"""Worker id and amount."""


@dataclass
class CountingModel:
    """The registry's expected answers, by plain counting."""

    incarnation: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, Part] = field(default_factory=dict)
    blocks: dict[str, Part] = field(default_factory=dict)

    def forget_worker(self, worker_id: str) -> None:
        self.incarnation.pop(worker_id, None)
        for held in (self.tokens, self.blocks):
            for reservation in [r for r, (holder, _) in held.items() if holder == worker_id]:
                del held[reservation]

    def release(self, reservation: str, prefill_done_only: bool = False) -> bool:
        freed = self.tokens.pop(reservation, None) is not None
        if not prefill_done_only:
            freed |= self.blocks.pop(reservation, None) is not None
        return freed

    def counters(self) -> dict[str, tuple[int, int, int]]:
        return {
            worker_id: (
                number,
                sum(amount for holder, amount in self.tokens.values() if holder == worker_id),
                sum(amount for holder, amount in self.blocks.values() if holder == worker_id),
            )
            for worker_id, number in self.incarnation.items()
        }


WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])
CHOICE = st.integers(0, 10**6)


class Books(RuleBasedStateMachine):
    """Any order of workers coming, dying and returning, and of requests reserving, releasing and expiring."""

    def __init__(self, url: str) -> None:
        super().__init__()
        namespace = uuid4().hex
        self.keys = key_prefix(namespace)
        self.loop = asyncio.Runner()
        self.registry = Registry.connect(url, namespace=namespace, timeout=30.0)
        self.redis = BlockingRedis.from_url(url, decode_responses=True)
        self.model = CountingModel()
        self.starts = 0
        self.made: list[str] = []

    def teardown(self) -> None:
        self.loop.run(self.registry.close())
        self.loop.close()
        self.redis.close()

    @rule(worker_id=WORKERS)
    def start(self, worker_id: str) -> None:
        """The first time, or a restart: a new incarnation either way."""
        self.starts += 1
        role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
        links = tuple(str(n) for n in range(200)) if role is Role.PREFILL else ()
        info = worker_info(worker_id, role, str(self.starts))
        self.loop.run(self.registry.leases.register(info, worker_load(linked=links), TTL))
        self.model.forget_worker(worker_id)
        self.model.incarnation[worker_id] = self.starts

    @rule(worker_id=WORKERS)
    def leave(self, worker_id: str) -> None:
        incarnation = self.model.incarnation.get(worker_id, 0)
        self.loop.run(self.registry.leases.deregister(worker_id, str(incarnation)))
        self.model.forget_worker(worker_id)

    @precondition(lambda self: self.model.incarnation)
    @rule(worker_id=WORKERS)
    def fall_silent(self, worker_id: str) -> None:
        self.redis.zadd(self.keys + "leases", {worker_id: 1}, xx=True)
        self.model.forget_worker(worker_id)

    @rule(tokens=st.integers(1, 400), policy=st.sampled_from(["require", "prefer", "never"]))
    def reserve(self, tokens: int, policy: str) -> None:
        alive = self.model.incarnation
        prefills, decodes = ([w for w in alive if w.startswith(role)] for role in "pd")
        possible = decodes and (prefills or policy != "require")
        try:
            reservation = self.loop.run(reserve(self.registry, tokens=tokens, prefill=policy))
        except NoWorkers:
            assert not possible
            return
        assert possible
        key = f"{self.keys}reservation:{reservation}"
        reader, writer = str(self.redis.hget(key, "tokens")), str(self.redis.hget(key, "blocks"))
        assert writer in decodes
        assert reader in prefills if prefills and policy != "never" else reader == writer
        self.model.tokens[reservation] = (reader, tokens)
        self.model.blocks[reservation] = (writer, -(-(tokens + 8) // BLOCK_SIZE))
        self.made.append(reservation)

    @precondition(lambda self: self.made)
    @rule(choice=CHOICE, prefill_done_only=st.booleans())
    def release(self, choice: int, prefill_done_only: bool) -> None:
        reservation = self.made[choice % len(self.made)]

        async def release() -> bool:
            return await self.registry.reservations.release(reservation, prefill_done_only=prefill_done_only)

        freed = self.loop.run(release())
        assert freed == self.model.release(reservation, prefill_done_only)

    @precondition(lambda self: self.made)
    @rule(choice=CHOICE)
    def expire(self, choice: int) -> None:
        reservation = self.made[choice % len(self.made)]
        self.redis.zadd(self.keys + "reservations", {reservation: 1}, xx=True)
        self.model.release(reservation)

    @invariant()
    def books_balance(self) -> None:
        workers = self.loop.run(self.registry.workers())
        seen = {w.info.worker_id: (int(w.info.incarnation), w.reserved_tokens, w.reserved_blocks) for w in workers}
        assert seen == self.model.counters()
        assert self.loop.run(self.registry.check_integrity()).violations == ()
        assert self.redis.zcard(self.keys + "reservations") == len({*self.model.tokens, *self.model.blocks})


@pytest.mark.long
def test_the_books_balance_in_any_order(redis_server: RedisServer) -> None:
    run_state_machine_as_test(
        lambda: Books(redis_server.url),  # type: ignore[arg-type]
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


async def test_a_starved_client_keeps_what_it_has_reserved_longer(
    registry: Registry, redis: Redis, redis_server: RedisServer, namespace: str
) -> None:
    await register_pool(registry)
    starved = Registry.connect(redis_server.url, namespace=namespace, client_lease_s=0.5, timeout=30.0)
    holding = asyncio.create_task(starved.gateways.hold(lambda: 60.0))
    await asyncio.sleep(0.1)
    await reserve(starved)
    holding.cancel()
    await asyncio.sleep(1.5)
    assert await totals(registry) == (40, 3)
    await starved.close()
    assert await totals(registry) == (0, 0)
