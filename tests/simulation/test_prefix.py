"""A burst behind a prefix that a worker has computed: another worker fetches it once, and none computes it again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
import pytest

from services.gateway.model.served import ServedModel
from services.gateway.settings import Disaggregation
from tests.simulation.cluster import MODEL, ClusterShape, Prompt, Reference, Reply, SimulatedCluster, SimulationSettings
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

SHARED, OWN, NUM_REQUESTS, ROUNDS = 1024, 32, 16, 6
# A prompt that keeps the prefill worker busy: the first one with the prefix then goes to the decode worker alone.
BUSY, BUSY_S = 1600, 0.05


@dataclass
class Burst:
    """The first request behind a prefix, and those that all come together after it."""

    first: Reply
    asked: list[tuple[Prompt, Reply]]
    computed: dict[str, int]  # worker: prompt tokens that it computed for the burst


def computed(cluster: SimulatedCluster) -> dict[str, int]:
    return {name: worker.context.engine.stats().num_prefilled_tokens for name, worker in cluster.workers.items()}


async def play(cluster: SimulatedCluster, random: Random) -> Burst:
    def prompt(beginning: tuple[int, ...], length: int) -> Prompt:
        return Prompt((*beginning, *random.choices(range(3, 4096), k=length)), 8)

    gateways = list(cluster.gateways)
    busy = [asyncio.create_task(cluster.ask(gateways[0], prompt((), BUSY))) for _ in range(2)]
    await asyncio.sleep(BUSY_S)
    shared = prompt((), SHARED).token_ids
    first = await cluster.ask(gateways[0], prompt(shared, OWN))
    await asyncio.gather(*busy)
    before = computed(cluster)
    burst = [prompt(shared, OWN) for _ in range(NUM_REQUESTS)]
    asked = [cluster.ask(gateways[i % len(gateways)], prompt) for i, prompt in enumerate(burst)]
    replies = await asyncio.gather(*asked)
    after = computed(cluster)
    counts = {name: after[name] - before[name] for name in after}
    return Burst(first, list(zip(burst, replies, strict=True)), counts)


async def rounds(cluster: SimulatedCluster) -> list[Burst]:
    random = Random(1)
    await cluster.ready()
    return [await play(cluster, random) for _ in range(ROUNDS)]


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_burst_computes_no_prefix_that_a_worker_holds(demo_model: Path, store: RedisStore, gateways: int) -> None:
    shape = ClusterShape(
        gateways, num_blocks=2048, block_size=16, max_num_batched_tokens=512, max_num_seqs=64,
        prefill_tokens_per_s=1200.0, decode_step_s=0.030, disaggregation=Disaggregation.AUTO,
    )  # fmt: skip
    settings, model = SimulationSettings(demo_model, shape), ServedModel.load(demo_model, MODEL, 0)
    with World(3) as world:
        cluster = SimulatedCluster(world, store, model, settings)
        played = world.run(cluster.client, rounds(cluster))
        assert world.errors == []
    reference = Reference(settings.worker("d0").engine_config())
    num_fetched = []
    for one in played:
        assert one.first.code is grpc.StatusCode.OK
        for prompt, reply in one.asked:
            assert (reply.code, reply.token_ids) == (grpc.StatusCode.OK, reference.tokens(prompt))
        assert sum(one.computed.values()) == NUM_REQUESTS * OWN, one.computed
        num_fetched.append(sum(reply.path.fetched_tokens for _, reply in one.asked if reply.path))
    assert set(num_fetched) == {0, SHARED}, "some rounds begin at the decode worker, and others do not"
