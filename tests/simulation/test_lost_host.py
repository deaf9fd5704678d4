"""A decode worker is lost with its host: nobody tells of what, and its answers go on at once, with a poison or without.

Its next start tells, where there is one: after all have gone on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
import pytest

from services.gateway.model.served import ServedModel
from tests.simulation.cluster import MODEL, ClusterShape, Prompt, Reference, Reply, SimulatedCluster, SimulationSettings
from tests.simulation.crashes import POISON
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

NUM_STREAMS, NEW_TOKENS = 300, 100
NUMBER, PLACE = 10, 30  # of the poison, and of the token that crashes who computes it
BEGUN_S, LOOK_S, BACK_S = 0.5, 0.02, 5.0
STILL_S = 3.0
SHAPE = ClusterShape(
    decodes=3, num_blocks=1 << 14, max_num_batched_tokens=512, max_num_seqs=256, launched=False, timeout_s=60.0
)


@dataclass
class WatchedStreams:
    """Answers as clients have them, and for how long each stood still at most."""

    asked: list[tuple[Prompt, Reply]]
    lengths: list[int] = field(default_factory=list)
    moved_at: list[float] = field(default_factory=list)
    still_s: list[float] = field(default_factory=list)

    def look(self, now: float) -> None:
        if not self.lengths:
            self.lengths, self.moved_at, self.still_s = [0] * len(self.asked), [now] * len(self.asked), []
            self.still_s = [0.0] * len(self.asked)
        for i, (_, reply) in enumerate(self.asked):
            if len(reply.token_ids) > self.lengths[i]:
                self.lengths[i], self.moved_at[i] = len(reply.token_ids), now
            elif reply.code is None:
                self.still_s[i] = max(self.still_s[i], now - self.moved_at[i])


async def play(cluster: SimulatedCluster, poisoned: bool) -> WatchedStreams:
    """Kill a decode worker for good, or send the poison, which kills it and any other that computes it."""
    random = Random(1)
    await cluster.ready()
    prompts = [
        Prompt(tuple(random.choices(range(3, 4096), k=8)), NEW_TOKENS, timeout_s=60.0) for _ in range(NUM_STREAMS)
    ]
    if poisoned:
        prompts.insert(NUM_STREAMS // 2, Prompt((POISON, 10 + PLACE, NUMBER, 4, 5), NEW_TOKENS, timeout_s=60.0))
        cluster.crashes.crashed = lambda name: cluster.world.after(BACK_S, cluster.start, name)
    streams = WatchedStreams([(prompt, Reply()) for prompt in prompts])
    tasks = [asyncio.create_task(cluster.ask("g0", prompt, reply=reply)) for prompt, reply in streams.asked]
    if not poisoned:
        cluster.world.after(BEGUN_S, cluster.processes["d0"].kill)
    while not all(task.done() for task in tasks):
        streams.look(cluster.world.now)
        await asyncio.sleep(LOOK_S)
    return streams


@pytest.mark.parametrize("poisoned", [False, True])
def test_all_go_on_at_once(demo_model: Path, store: RedisStore, poisoned: bool) -> None:
    settings, model = SimulationSettings(demo_model, SHAPE), ServedModel.load(demo_model, MODEL, 0)
    with World(5) as world:
        cluster = SimulatedCluster(world, store, model, settings)
        streams = world.run(cluster.client, play(cluster, poisoned))
        crashed = cluster.crashes.of_prompt[NUMBER]
        assert world.errors == []
    reference = Reference(settings.worker("d0").engine_config())
    moved = [reply for _, reply in streams.asked if reply.path and reply.path.migrated]
    print(f"{len(moved)} went on elsewhere, still for at most {max(streams.still_s):.2f} s, {crashed} crashes")
    assert len(moved) > NUM_STREAMS / 4
    for prompt, reply in streams.asked:
        if prompt.token_ids[0] == POISON:
            assert reply.code is grpc.StatusCode.FAILED_PRECONDITION
        else:
            assert (reply.code, reply.token_ids) == (grpc.StatusCode.OK, reference.tokens(prompt)), reply.details
    assert crashed == (2 if poisoned else 0)
    if not poisoned:
        assert max(streams.still_s) < STILL_S
