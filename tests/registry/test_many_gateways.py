"""Eight gateways decide as one does: the same prefix hit rate, the same spread, and everything released.

Requests are truly concurrent: each wave is sent at once, so with one gateway they share calls and with eight they race.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from uuid import uuid4

import pytest

from tandem.local import RedisServer
from tandem.registry import BlockReplica, PromptPrefix, Registry, Role, Route
from tests.registry.cluster import BLOCK_SIZE, MODEL, REVISION, worker_info, worker_load

PAIRS = 8
NUM_BLOCKS = 512
WAVES, AT_ONCE = 48, 16
TOPICS = 48


@dataclass(slots=True)
class Cache:
    """A worker's prefix cache: least recently used blocks go first, the ends of prompts before their beginnings."""

    worker_id: str
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    async def keep(self, registry: Registry, hashes: list[bytes]) -> None:
        stored = [name for name in hashes if name not in self.blocks]
        for name in reversed(hashes):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        removed = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - NUM_BLOCKS)]
        await registry.leases.publish_blocks(self.worker_id, f"{self.worker_id}-first", stored, removed)


def prompts(chance: random.Random) -> list[list[bytes]]:
    """Block names of one wave's prompts: a topic's beginning, some topics far more common, and an end of their own."""
    topics = [min(int(chance.paretovariate(0.6)), TOPICS) for _ in range(AT_ONCE)]
    beginnings = [[b"%07d,%08d" % (topic, i) for i in range(16 + topic)] for topic in topics]
    return [begun + [chance.randbytes(16) for _ in range(chance.randrange(1, 12))] for begun in beginnings]


async def register(registry: Registry) -> dict[str, Cache]:
    size = {"num_blocks": NUM_BLOCKS, "max_model_len": NUM_BLOCKS * BLOCK_SIZE, "max_num_seqs": 64}
    links = tuple(f"d{i}-first" for i in range(PAIRS))
    for i in range(PAIRS):
        for name, role, linked in ((f"d{i}", Role.DECODE, ()), (f"p{i}", Role.PREFILL, links)):
            load = worker_load(free_blocks=NUM_BLOCKS, linked=linked)
            await registry.leases.register(worker_info(name, role, "", **size), load, 60.0)
    return {f"{role}{i}": Cache(f"{role}{i}") for role in "dp" for i in range(PAIRS)}


class RegistryClient:
    """A client of the registry with a replica of its own."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.replica = BlockReplica(registry.block_feed)

    async def request(self, hashes: list[bytes]) -> Route:
        prefix = PromptPrefix.of(REVISION, BLOCK_SIZE, hashes, self.replica.holders(hashes))
        return await self.registry.reservations.select_and_reserve(
            request_id="r", model=MODEL, prompt_tokens=len(hashes) * BLOCK_SIZE, max_new_tokens=64, prefill="require",
            prefix=prefix, ttl=60.0,
        )  # fmt: skip


async def gateways_on(redis: RedisServer, count: int) -> list[RegistryClient]:
    namespace = uuid4().hex
    clients = [Registry.connect(redis.url, namespace=namespace, timeout=30.0) for _ in range(count)]
    return [RegistryClient(client) for client in clients]


async def hit_rate_and_spread(redis: RedisServer, num_gateways: int) -> tuple[float, Counter[str]]:
    """Measures the same waves of requests, each dealt out to the gateways and sent at once."""
    chance = random.Random(7)
    gateways = await gateways_on(redis, num_gateways)
    registry = gateways[0].registry
    caches = await register(registry)
    asked = hit = 0
    spread: Counter[str] = Counter()
    for number in range(WAVES):
        wave = prompts(chance)
        routes = await asyncio.gather(*(gateways[i % num_gateways].request(hashes) for i, hashes in enumerate(wave)))
        for route, hashes in zip(routes, wave, strict=True):
            assert route.prefill is not None
            asked += len(hashes) * BLOCK_SIZE
            hit += hits(route)
            spread[route.prefill.info.worker_id] += 1
            for place in (route.prefill, route.decode):
                await caches[place.info.worker_id].keep(registry, hashes)
        await asyncio.gather(*(registry.reservations.release(route.reservation_id) for route in routes))
        if number % 2:  # reports come later than their requests
            await asyncio.gather(*(gateway.replica.refresh() for gateway in gateways))
    assert (await registry.check_integrity()).violations == ()
    assert all(w.reserved_tokens == w.reserved_blocks == 0 for w in await registry.workers())
    for gateway in gateways:
        await gateway.registry.close()
    return hit / asked, spread


def hits(route: Route) -> int:
    """Tokens that are not computed: cached there, or to be had from another worker."""
    said = r"remote prefill: (\d+) prompt tokens cached there, \d+ at decode(?:, (\d+) to be had)?"
    found = re.match(said, route.reason)
    assert found
    return max(int(found[1]), int(found[2] or 0))


@pytest.mark.long
async def test_eight_gateways_hit_as_often_as_one(redis_server: RedisServer) -> None:
    one, spread_of_one = await hit_rate_and_spread(redis_server, 1)
    eight, spread_of_eight = await hit_rate_and_spread(redis_server, 8)
    assert one > 0.5
    assert abs(one - eight) < 0.01
    for spread in (spread_of_one, spread_of_eight):
        assert len(spread) == PAIRS
        assert max(spread.values()) < 0.6 * spread.total(), "no more than its two most common topics draw to a worker"
