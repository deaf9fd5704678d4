"""`python -m tests.chaos.explorer.aborts 10000`: clients hang up behind every message of a request's life.

In one cluster after another, one request after another is hung up, so many messages behind its beginning, while another
that begins alike goes on. Each time nothing may be held 2 s later, and the other's tokens are its own.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from services.gateway.model.served import ServedModel
from tandem.local import RedisServer
from tests.chaos.explorer.run import SETTLE_S
from tests.chaos.explorer.schedule import SHAPES, VOCABULARY
from tests.simulation.baseline import leftovers, registry_leftovers, sizes
from tests.simulation.cluster import MODEL, ClusterShape, Prompt, Reference, SimulatedCluster, SimulationSettings
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

MODEL_PATH = Path(__file__).parents[3] / "models" / "demo" / "target"
ABORTS_A_CLUSTER, MOST_MESSAGES = 50, 100
LIMIT_S = 600.0


class Aborts:
    def __init__(self, store: RedisStore, model_path: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.longest_s = 0.0
        self._store, self._model_path = store, model_path
        self._model = ServedModel.load(model_path, MODEL, 0)
        config = SimulationSettings(model_path, ClusterShape(num_blocks=256)).worker("d0").engine_config()
        self._tokens: Callable[[Prompt], list[int]] = Reference(config).tokens

    def run(self, count: int) -> None:
        for seed in range(-(-count // ABORTS_A_CLUSTER)):
            shape = SHAPES[seed % len(SHAPES)]
            with World(seed) as world:
                cluster = SimulatedCluster(world, self._store, self._model, SimulationSettings(self._model_path, shape))
                world.run(cluster.client, self._abort_many(cluster, Random(seed)), limit_s=LIMIT_S)
                self.violations += world.errors

    async def _abort_many(self, cluster: SimulatedCluster, random: Random) -> None:
        await cluster.ready()
        await asyncio.sleep(0.3)
        before = sizes(cluster)
        for _ in range(ABORTS_A_CLUSTER):
            messages = random.randint(1, MOST_MESSAGES)
            await self._abort_one(cluster, random, messages)
            await self._settle(cluster, before, messages)

    async def _abort_one(self, cluster: SimulatedCluster, random: Random, messages: int) -> None:
        beginning = random.choices(range(3, VOCABULARY), k=random.choice((1, 8, 17)))
        longest = cluster.shape.num_blocks * cluster.shape.block_size - 40  # more than 2 s, where there is room for it
        victim, neighbour = (
            Prompt((*beginning, *random.choices(range(3, VOCABULARY), k=9)), new, random.choice((0.0, 0.8)), messages)
            for new in (longest, 6)
        )
        other = asyncio.create_task(cluster.ask("g0", neighbour))
        asked = asyncio.create_task(cluster.ask("g0", victim))
        reached = asyncio.get_running_loop().create_future()
        cluster.network.at_message(messages, lambda: reached.set_result(None))
        await asyncio.wait([reached, asked], return_when=asyncio.FIRST_COMPLETED)
        self.counts["aborted" if asked.cancel() else "ended before"] += 1
        await asyncio.wait([asked])
        reply = await other
        if reply.token_ids != self._tokens(neighbour):
            self.violations.append(f"behind {messages} messages: its neighbour got {reply}")

    async def _settle(self, cluster: SimulatedCluster, before: dict[str, tuple[int, int]], messages: int) -> None:
        registry, began = cluster.registry_of(cluster.client), cluster.world.now
        while held := leftovers(cluster) or await registry_leftovers(registry) or _grown(cluster, before):
            if cluster.world.now - began > SETTLE_S:
                self.violations.append(f"behind {messages} messages: {held}")
                break
            await asyncio.sleep(0.02)
        self.longest_s = max(self.longest_s, cluster.world.now - began)
        await registry.close()


def _grown(cluster: SimulatedCluster, before: dict[str, tuple[int, int]]) -> list[str]:
    """Processes with more tasks or connections than before; the client's own connection to Redis looks now."""
    return [f"{name}: {now} tasks and connections, {before[name]} before" for name, now in sizes(cluster).items()
            if now[0] > before[name][0] or now[1] > before[name][1]]  # fmt: skip


def abort(model_path: Path, count: int) -> Aborts:
    with RedisServer.start() as server, RedisStore(server.port) as store:
        aborts = Aborts(store, model_path)
        aborts.run(count)
        return aborts


def main() -> None:
    began = time.monotonic()
    aborts = abort(MODEL_PATH, int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    print(f"{dict(aborts.counts)} in {time.monotonic() - began:.0f} s; all released within {aborts.longest_s:.3f} s")
    print(*aborts.violations, sep="\n")
    sys.exit(bool(aborts.violations))


if __name__ == "__main__":
    main()
