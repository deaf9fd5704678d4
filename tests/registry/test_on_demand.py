"""A launcher's word on its models reaches gateways and ends with it; theirs on the use of each reaches the launcher."""

from __future__ import annotations

import asyncio
import json

import pytest
from redis.asyncio import Redis

from tandem.registry import ModelStatus, ModelUse, Registry, Wakefulness
from tests.registry.conftest import Connect

ASLEEP = ModelStatus("small", Wakefulness.ASLEEP, left_s=4.0)


async def test_each_side_hears_the_other(registry: Registry, connect: Connect) -> None:
    launcher, second = registry, await connect()
    assert await second.on_demand.ask({}) == {}
    assert await launcher.on_demand.tell([ASLEEP], 30.0) == {"small": ModelUse()}
    assert await second.on_demand.ask({}) == {"small": ASLEEP}
    await second.on_demand.ask({"small": ModelUse(wanted_s=0.0), "unknown": ModelUse(ran_s=0.0)})
    used = (await launcher.on_demand.tell([ASLEEP], 30.0))["small"]
    assert used.wanted_s == pytest.approx(0.0, abs=1.0)
    assert used.ran_s == float("inf")


async def test_the_latest_use_at_any_gateway_counts(registry: Registry, connect: Connect) -> None:
    second = await connect()
    await registry.on_demand.tell([ASLEEP], 30.0)
    await registry.on_demand.ask({"small": ModelUse(ran_s=100.0)})
    await second.on_demand.ask({"small": ModelUse(ran_s=900.0)})
    used = (await registry.on_demand.tell([ASLEEP], 30.0))["small"]
    assert used.ran_s == pytest.approx(100.0, abs=2.0)


async def test_what_a_launcher_said_ends_with_its_time(registry: Registry, redis: Redis, namespace: str) -> None:
    await registry.on_demand.tell([ASLEEP], 0.2)
    await registry.on_demand.ask({"small": ModelUse(ran_s=0.0, wanted_s=0.0)})
    await asyncio.sleep(0.3)
    assert await registry.on_demand.ask({}) == {}
    assert [name async for name in redis.scan_iter(f"{{{namespace}}}*on_demand*")] == []


async def test_what_cannot_be_understood_is_not_there(registry: Registry, redis: Redis, namespace: str) -> None:
    await registry.on_demand.tell([ASLEEP], 30.0)
    (texts,) = [name async for name in redis.scan_iter(f"{{{namespace}}}*:on_demand")]
    newer = {"name": "x", "state": "dreaming"}, {"name": "x", "state": "awake", "more": 1}, [], "x"
    for number, said in enumerate(newer):
        await redis.hset(texts, f"n{number}", json.dumps(said))
    await redis.hset(texts, "broken", "{")
    assert await registry.on_demand.ask({}) == {"small": ASLEEP}
