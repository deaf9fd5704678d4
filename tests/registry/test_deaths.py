"""How workers died: said once, found by every gateway, bounded."""

from __future__ import annotations

from redis.asyncio import Redis

from tandem.containment.crash_page import Death
from tandem.registry import Registry
from tandem.registry.wire.scripts import key_prefix
from tests.registry.conftest import Connect


async def test_a_death_is_known_to_all_and_the_first_word_counts(registry: Registry, connect: Connect) -> None:
    assert await registry.death("one") is None
    death = Death("one", "SIGSEGV", {"a-0": 7, "b-1": 0})
    await registry.report_death(death)
    await registry.report_death(Death("one", ""))
    assert await (await connect()).death("one") == death
    assert await registry.death("two") is None


async def test_so_many_deaths_are_remembered(registry: Registry, redis: Redis, namespace: str) -> None:
    for i in range(80):
        await registry.report_death(Death(f"{i}", "SIGABRT", {"a": i}))
    assert await registry.death("15") is None
    assert await registry.death("16") == Death("16", "SIGABRT", {"a": 16})
    assert len(await redis.keys(f"{key_prefix(namespace)}death*")) == 65
    assert 0 < await redis.pttl(f"{key_prefix(namespace)}death:79") <= 600_000
