"""The seam: a whole cluster's real code on virtual time, and every run a function of its seed."""

from __future__ import annotations

import asyncio
import time
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from services.gateway.model.served import ServedModel
from tests.simulation.cluster import MODEL, ClusterShape, Prompt, Reference, Reply, SimulatedCluster, SimulationSettings
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

SIMULATED_S = 60.0
REQUESTS_PER_S = 2.0
VOCABULARY = 4096


@pytest.fixture(scope="module")
def settings(demo_model: Path) -> SimulationSettings:
    return SimulationSettings(demo_model, ClusterShape(decodes=2))


@pytest.fixture(scope="module")
def model(demo_model: Path) -> ServedModel:
    return ServedModel.load(demo_model, MODEL, 0)


def prompt_of(random: Random) -> Prompt:
    """Every other prompt begins like another one."""
    beginning = Random(random.randrange(4)).choices(range(3, VOCABULARY), k=random.randrange(0, 24))
    rest = random.choices(range(3, VOCABULARY), k=random.randrange(1, 16))
    temperature, seed = random.choice([(0.0, 0), (0.8, random.randrange(5))])
    return Prompt((*beginning, *rest), random.randrange(1, 40), temperature, seed)


async def traffic(cluster: SimulatedCluster) -> list[tuple[Prompt, Reply]]:
    random, asked = Random(cluster.world.random.getrandbits(64)), []
    await cluster.ready()
    while cluster.world.now < SIMULATED_S - 5:
        prompt = prompt_of(random)
        asked.append((prompt, asyncio.create_task(cluster.ask("g0", prompt))))
        await asyncio.sleep(random.expovariate(REQUESTS_PER_S))
    answered = [(prompt, await reply) for prompt, reply in asked]
    await asyncio.sleep(SIMULATED_S - cluster.world.now)
    return answered


def run(seed: int, store: RedisStore, model: ServedModel, settings: SimulationSettings) -> tuple[list[Any], list[Any]]:
    with World(seed) as world:
        cluster = SimulatedCluster(world, store, model, settings)
        answered = world.run(cluster.client, traffic(cluster))
        assert world.errors == []
        return answered, world.events


def first_difference(one: list[Any], other: list[Any]) -> tuple[Any, Any] | None:
    return next((pair for pair in zip_longest(one, other) if pair[0] != pair[1]), None)


@pytest.mark.long
def test_a_minute_of_traffic_takes_less_and_is_the_same_twice(
    store: RedisStore, model: ServedModel, settings: SimulationSettings
) -> None:
    began = time.process_time()
    answered, events = run(7, store, model, settings)
    took = time.process_time() - began
    again, same_events = run(7, store, model, settings)
    assert first_difference(events, same_events) is None
    assert answered == again
    assert first_difference(events, run(8, store, model, settings)[1]) is not None

    reference = Reference(settings.worker("d0").engine_config())
    assert len(answered) > REQUESTS_PER_S * SIMULATED_S / 2
    for prompt, reply in answered:
        assert (reply.code, reply.token_ids) == (grpc.StatusCode.OK, reference.tokens(prompt))
    assert took < SIMULATED_S  # 3 to 6 s, by the CPU


@pytest.mark.parametrize("seed", range(2))
def test_a_cluster_serves_on_whatever_redis_has(
    store: RedisStore, model: ServedModel, settings: SimulationSettings, seed: int
) -> None:
    """No process ends; every answer that ends well is the right one, and all do once nothing is spoiled any more."""

    async def work(cluster: SimulatedCluster) -> None:
        random, reference = Random(seed), Reference(settings.worker("d0").engine_config())
        await cluster.ready()
        spoilt, replies = [], []
        for _ in range(60):
            spoilt.append(cluster.redis.spoil(random))
            prompt = prompt_of(random)
            replies.append((prompt, asyncio.create_task(cluster.ask("g0", prompt))))
            await asyncio.sleep(random.random())
            assert cluster.exits == [], spoilt[-5:]
        await asyncio.sleep(5.0)
        replies += [(prompt, asyncio.create_task(cluster.ask("g0", prompt))) for prompt in [prompt_of(random)] * 3]
        ended = [(prompt, await reply) for prompt, reply in replies]
        for prompt, reply in ended:
            assert reply.code is not grpc.StatusCode.OK or reply.token_ids == reference.tokens(prompt)
        assert [reply.code for _, reply in ended[-3:]] == [grpc.StatusCode.OK] * 3, spoilt

    with World(seed) as world:
        cluster = SimulatedCluster(world, store, model, settings)
        world.run(cluster.client, work(cluster))
        assert world.errors == []
