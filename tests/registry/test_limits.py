"""A tenant's limits hold whichever gateway its requests come through, and what it used comes back as it should."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tandem.local import RedisServer
from tandem.registry import Limits, Registry, Taken
from tandem.registry.wire.scripts import key_prefix
from tests.registry.cluster import end_client_leases, eventually
from tests.registry.conftest import Connect


async def take(registry: Registry, limits: Limits, tokens: int = 10, cost: float = 0.0, tenant: str = "t") -> Taken:
    return await registry.limits.take(tenant, limits, request_id="r/1", tokens=tokens, cost=cost, ttl=60.0)


async def test_no_more_requests_than_a_minute_has_through_any_gateway(connect: Connect) -> None:
    clients, limits = [await connect() for _ in range(4)], Limits(requests_per_minute=10)
    taken = await asyncio.gather(*(take(clients[i % 4], limits) for i in range(40)))
    allowed = [one for one in taken if not one.lacks]
    assert len(allowed) == 10
    assert {one.lacks for one in taken} == {"", "requests"}
    assert sorted(one.requests_left for one in allowed) == list(range(10))
    assert all(1.0 <= one.wait_s <= 6.0 for one in taken if one.lacks), "a tenth of a minute, or a little less"
    assert all(30.0 <= one.requests_full_s <= 60.0 for one in taken if one.lacks)
    assert not (await take(clients[0], limits, tenant="other")).lacks


async def test_tokens_come_back_with_time_and_those_not_used_at_once(registry: Registry) -> None:
    limits = Limits(tokens_per_minute=6000)
    first = await take(registry, limits, tokens=6000)
    assert (first.lacks, first.tokens_left) == ("", 0)
    second = await take(registry, limits, tokens=600)
    assert second.lacks == "tokens"
    assert 0.0 < second.wait_s <= 6.0
    await registry.limits.settle(first, prompt_tokens=100, completion_tokens=400, cost=0.0)
    third = await take(registry, limits, tokens=5400)
    assert third.lacks == ""
    await registry.limits.settle(first, prompt_tokens=0, completion_tokens=0, cost=0.0)  # once is enough
    assert (await take(registry, limits, tokens=2000)).lacks == "tokens"

    async def some_back() -> bool:
        return not (await take(registry, limits, tokens=50)).lacks

    await eventually(some_back, "half a second's tokens")


async def test_places_are_for_those_inside_and_come_back_from_dead_gateways(
    registry: Registry, redis: Redis, redis_server: RedisServer, namespace: str
) -> None:
    limits = Limits(concurrent_requests=2)
    holding = Registry.connect(redis_server.url, namespace=namespace, client_lease_s=60.0, timeout=30.0)
    lease = asyncio.create_task(holding.gateways.hold())
    taken = [await take(holding, limits) for _ in range(3)]
    assert [one.lacks for one in taken] == ["", "", "concurrent"]
    await holding.limits.settle(taken[0], 1, 1, 0.0)
    assert not (await take(holding, limits)).lacks
    assert (await take(holding, limits)).lacks == "concurrent"
    lease.cancel()
    assert (await take(registry, limits)).lacks == "concurrent"
    await end_client_leases(redis, namespace)
    assert not (await take(registry, limits)).lacks
    await holding.close()


async def test_the_days_budget_is_for_what_was_used(registry: Registry) -> None:
    limits = Limits(daily_budget=1.0)
    first = await take(registry, limits, cost=0.9)
    assert not first.lacks
    second = await take(registry, limits, cost=0.2)
    assert second.lacks == "budget"
    assert 0 < second.wait_s <= 86400
    assert (await registry.limits.usage("t")).cost == pytest.approx(0.9)
    await registry.limits.settle(first, prompt_tokens=30, completion_tokens=5, cost=0.25)
    usage = await registry.limits.usage("t")
    assert (usage.requests, usage.prompt_tokens, usage.completion_tokens) == (1, 30, 5)
    assert usage.cost == pytest.approx(0.25)
    assert not (await take(registry, limits, cost=0.7)).lacks
    assert (await registry.limits.usage("nobody")).cost == 0


@pytest.mark.parametrize(
    ("limits", "tokens", "lacks"),
    [
        (Limits(requests_per_minute=1, tokens_per_minute=5), 10, "tokens"),
        (Limits(requests_per_minute=1, concurrent_requests=1), 10, ""),
    ],
)
async def test_what_is_refused_takes_nothing(registry: Registry, limits: Limits, tokens: int, lacks: str) -> None:
    assert (await take(registry, limits, tokens=tokens)).lacks == lacks
    again = await take(registry, Limits(requests_per_minute=1))
    assert (again.lacks == "") is (lacks != "")


async def test_a_call_given_up_holds_no_place(registry: Registry, redis: Redis, namespace: str) -> None:
    for i in range(30):
        call = asyncio.create_task(take(registry, Limits(concurrent_requests=100)))
        await asyncio.sleep(i * 2e-5)
        call.cancel()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(outcome, Taken):
            await registry.limits.settle(outcome, 0, 0, 0.0)

    async def empty() -> bool:
        return bool(await redis.zcard(f"{key_prefix(namespace)}inside:t") == 0)

    await eventually(empty, "nobody inside")
