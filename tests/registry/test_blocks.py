"""Who holds which KV block."""

from __future__ import annotations

import pytest

from tandem.registry import Registry, Role, StaleIncarnation
from tests.registry.cluster import NUM_BLOCKS, register_pool, worker_info, worker_load

A, B, C = (bytes([255 - i]) * 16 for i in range(3))


async def test_blocks_are_found_where_they_were_published(registry: Registry) -> None:
    await register_pool(registry, decode=2)
    await registry.leases.publish_blocks("d1", "d1-first", [A, B], [])
    await registry.leases.publish_blocks("p0", "p0-first", [B], [])
    assert await registry.locate([A, B, C]) == [["d1"], ["d1", "p0"], []]
    await registry.leases.publish_blocks("d1", "d1-first", [C], [B, A])
    assert await registry.locate([A, B, C]) == [[], ["p0"], ["d1"]]
    assert await registry.locate([]) == []


async def test_only_a_live_incarnation_may_publish(registry: Registry) -> None:
    with pytest.raises(StaleIncarnation):
        await registry.leases.publish_blocks("d0", "d0-first", [A], [])
    await register_pool(registry)
    with pytest.raises(StaleIncarnation):
        await registry.leases.publish_blocks("d0", "another", [A], [])
    assert await registry.locate([A]) == [[]]


async def test_a_worker_is_never_known_for_more_blocks_than_it_has(registry: Registry) -> None:
    await register_pool(registry)
    hashes = [i.to_bytes(16, "big") for i in range(3 * NUM_BLOCKS)]
    for i in range(0, len(hashes), 10):
        await registry.leases.publish_blocks("d0", "d0-first", hashes[i : i + 10], [])
    found = [workers for workers in await registry.locate(hashes) if workers]
    assert len(found) == NUM_BLOCKS


async def test_thousands_of_blocks_in_one_call(registry: Registry) -> None:
    hashes = [i.to_bytes(16, "big") for i in range(5000)]
    await registry.leases.register(worker_info("d0", Role.DECODE, num_blocks=6000), worker_load(), 30)
    await registry.leases.publish_blocks("d0", "d0-first", hashes, [])
    assert await registry.locate(hashes) == [["d0"]] * 5000
    await registry.leases.publish_blocks("d0", "d0-first", [], hashes)
    assert await registry.locate(hashes) == [[]] * 5000
