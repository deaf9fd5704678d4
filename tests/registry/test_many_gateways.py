"""Eight gateways decide as one does: the same prefix hit rate, the same spread, and everything given back."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from uuid import uuid4

from tandem.clock import SystemClock
from tandem.redis_server import RedisServer
from tandem.registry import PromptPrefix, Registry, Role, Route
from tests.registry.cluster import BLOCK_SIZE, MODEL, REVISION, worker_info, worker_load

PAIRS = 8
NUM_BLOCKS = 512
WAVES, AT_ONCE = 24, 8
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
        await registry.publish_blocks(self.worker_id, f"{self.worker_id}-first", stored, removed)


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
            await registry.register(worker_info(name, role, "", **size), load, 60.0)
    return {f"{role}{i}": Cache(f"{role}{i}") for role in "dp" for i in range(PAIRS)}


async def request(gateway: Registry, hashes: list[bytes]) -> Route:
    return await gateway.select_and_reserve(
        request_id="r", model=MODEL, prompt_tokens=len(hashes) * BLOCK_SIZE, max_new_tokens=64, prefill="require",
        prefix=PromptPrefix.of(REVISION, BLOCK_SIZE, hashes), ttl=60.0,
    )  # fmt: skip


async def hit_rate_and_spread(redis: RedisServer, num_gateways: int) -> tuple[float, Counter[str]]:
    """Of the same waves of requests, each dealt out to the gateways in turn."""
    namespace, chance = uuid4().hex, random.Random(7)
    gateways = [
        await Registry.connect(redis.url, namespace=namespace, clock=SystemClock()) for _ in range(num_gateways)
    ]
    caches = await register(gateways[0])
    asked = hit = 0
    spread: Counter[str] = Counter()
    for _ in range(WAVES):
        wave = prompts(chance)
        # In the same order for any number of gateways: what differs is only who asks.
        routes = [await request(gateways[i % num_gateways], hashes) for i, hashes in enumerate(wave)]
        for route, hashes in zip(routes, wave, strict=True):
            assert route.prefill is not None
            asked += len(hashes) * BLOCK_SIZE
            hit += hits(route)
            spread[route.prefill.info.worker_id] += 1
            for worker in (route.prefill, route.decode):
                await caches[worker.info.worker_id].keep(gateways[0], hashes)
        await asyncio.gather(*(gateways[i % num_gateways].release(r.reservation_id) for i, r in enumerate(routes)))
    assert await gateways[0].check_integrity() == []
    assert all(w.reserved_tokens == w.reserved_blocks == 0 for w in await gateways[0].workers())
    for gateway in gateways:
        await gateway.close()
    return hit / asked, spread


def hits(route: Route) -> int:
    found = re.match(r"remote prefill: (\d+) prompt tokens cached there", route.reason)
    assert found
    return int(found[1])


async def test_eight_gateways_hit_as_often_as_one(redis_server: RedisServer) -> None:
    one, spread_of_one = await hit_rate_and_spread(redis_server, 1)
    eight, spread_of_eight = await hit_rate_and_spread(redis_server, 8)
    assert one > 0.5
    assert abs(one - eight) < 0.01
    for spread in (spread_of_one, spread_of_eight):
        assert len(spread) == PAIRS
        assert max(spread.values()) < 0.45 * spread.total(), "no more than its most common topic draws to a worker"
