"""The next turn's prompt is the last turn's prompt and answer: its KV comes from the worker that wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from services.gateway.model.served import ServedModel
from services.gateway.settings import Disaggregation
from tests.simulation.baseline import leftovers
from tests.simulation.cluster import MODEL, ClusterShape, Prompt, Reference, Reply, SimulatedCluster, SimulationSettings
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

TURNS, BLOCK, SAID = 8, 4, 5
SHAPE = ClusterShape(
    block_size=BLOCK, num_blocks=256, disaggregation=Disaggregation.REQUIRE, prefill_tokens_per_s=400.0
)
Turns = list[tuple[Prompt, Reply]]


@pytest.fixture(scope="module")
def model(demo_model: Path) -> ServedModel:
    return ServedModel.load(demo_model, MODEL, 0)


def played(
    script: Callable[[SimulatedCluster], Coroutine[Any, Any, Turns]], shape: ClusterShape, store: RedisStore,
    model: ServedModel, folder: Path,
) -> Turns:  # fmt: skip
    """All turns of a conversation; every one got what one engine writes, and nothing is left."""
    settings = SimulationSettings(folder, shape)

    async def play() -> Turns:
        await cluster.ready()
        turns = await script(cluster)
        await asyncio.sleep(2.0)
        assert leftovers(cluster) == []
        return turns

    with World(1) as world:
        cluster = SimulatedCluster(world, store, model, settings)
        turns = world.run(cluster.client, play())
        assert world.errors == []
    reference = Reference(settings.worker("d0").engine_config())
    for prompt, reply in turns:
        assert reply.code is grpc.StatusCode.OK
        assert reply.token_ids == reference.tokens(prompt)
    return turns


async def converse(cluster: SimulatedCluster, between: Callable[[int, Reply], None] = lambda *turn: None) -> Turns:
    random, turns = Random(1), Turns()
    tokens = tuple(random.choices(range(3, 4096), k=40))
    for turn in range(TURNS):
        prompt = Prompt(tokens, max_tokens=30)
        turns.append((prompt, await cluster.ask("g0", prompt)))
        tokens = (*tokens, *turns[-1][1].token_ids, *random.choices(range(3, 4096), k=SAID))
        between(turn, turns[-1][1])
        await asyncio.sleep(0.1)
    return turns


@pytest.mark.parametrize("pairs", [1, 2])
def test_only_what_is_new_is_prefilled(store: RedisStore, model: ServedModel, demo_model: Path, pairs: int) -> None:
    turns = played(converse, replace(SHAPE, prefills=pairs, decodes=pairs), store, model, demo_model)
    for prompt, reply in turns[1:]:
        assert len(prompt.token_ids) - reply.cached_tokens <= SAID + BLOCK
    assert all(reply.path and reply.path.fetched_tokens for _, reply in turns[1:])


def test_a_holder_that_dies_costs_its_answers_alone(store: RedisStore, model: ServedModel, demo_model: Path) -> None:
    async def script(cluster: SimulatedCluster) -> Turns:
        def kill(turn: int, reply: Reply) -> None:
            if turn == 3:
                cluster.processes["d0"].kill()
                cluster.start("d0")

        return await converse(cluster, kill)

    turns = played(script, SHAPE, store, model, demo_model)
    computed = [len(prompt.token_ids) - reply.cached_tokens for prompt, reply in turns]
    assert 30 < computed[4] <= 30 + SAID + BLOCK
    assert max(computed[1:4] + computed[5:]) <= SAID + BLOCK


def test_a_decode_worker_that_prefills_fetches_too(store: RedisStore, model: ServedModel, demo_model: Path) -> None:
    """There is no prefill worker, and the worker that wrote the fourth turn takes nothing new."""

    async def script(cluster: SimulatedCluster) -> Turns:
        def refuse(turn: int, reply: Reply) -> None:
            if turn == 3 and reply.path:
                writer = cluster.workers[reply.path.decode_worker]
                writer._leaving.set()
                writer._lease.renew_now()

        return await converse(cluster, refuse)

    shape = replace(SHAPE, prefills=0, decodes=2, disaggregation=Disaggregation.PREFER)
    turns = played(script, shape, store, model, demo_model)
    for prompt, reply in turns[1:]:
        assert len(prompt.token_ids) - reply.cached_tokens <= SAID + BLOCK
    paths = [reply.path for _, reply in turns if reply.path]
    assert paths[4].fetched_tokens
    assert paths[4].fetched_from == paths[3].decode_worker != paths[4].decode_worker
