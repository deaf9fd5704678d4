"""Workers and clients come, leave, die and wait: no request is lost by it, and each has its own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count, permutations
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
from grpc import StatusCode

from services.gateway.model.served import ServedModel
from services.gateway.settings import Disaggregation
from tandem.v1 import llm_pb2
from tests.chaos.explorer.run import SETTLE_S
from tests.simulation.baseline import leftovers, registry_leftovers, sizes
from tests.simulation.cluster import (
    DRAIN_S,
    MODEL,
    ClusterShape,
    Prompt,
    Reference,
    Reply,
    SimulatedCluster,
    SimulationSettings,
)
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

LIMIT_S, READY_WITHIN_S = 900.0, 1.0
# A request's prompt is prefilled in one step, and its answer is short, but where a test says otherwise.
NUM_PROMPT, NUM_NEW, VOCABULARY = 32, 8, 4096
# Not a multiple of the intervals at which a process looks again for another.
START_EVERY_S = 0.9
# Times to the first token of requests to a warm cluster, and how much longer another one may take.
NUM_WARM, MOST_OF_WARM = 8, 1.2
# Workers of each role, and names that they take in turn.
CHURN_S, SIZE, NUM_NAMES = 120, 2, 6
# Not in step with the workers; one answer in thirty takes longer than a worker that leaves waits.
ASK_EVERY_S, LENGTHS = 0.9, (700, *29 * (40,))
RESTARTS, DOWN_S, MOST_LOST_S = 20, 0.3, 1.0
IDLE_S, BURST = 600.0, 32


class Clients:
    """They all ask g0, each something that nobody else asks."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.asked: list[tuple[Prompt, Reply]] = []
        self._cluster = cluster
        self._random = Random(0)

    async def ask(self, num_new: int = NUM_NEW) -> None:
        prompt, reply = Prompt(tuple(self._random.choices(range(3, VOCABULARY), k=NUM_PROMPT)), num_new), Reply()
        self.asked.append((prompt, reply))
        await self._cluster.ask("g0", prompt, reply=reply)

    @asynccontextmanager
    async def asking(self, every_s: float, *lengths: int) -> AsyncIterator[None]:
        """While the block runs; behind it every request has ended."""
        answers: list[asyncio.Task[None]] = []

        async def ask_on() -> None:
            for i in count():
                answers.append(asyncio.create_task(self.ask(lengths[i % len(lengths)])))
                await asyncio.sleep(every_s)

        going = asyncio.create_task(ask_on())
        yield
        assert going.cancel()
        await asyncio.gather(*answers)


Play = Callable[[SimulatedCluster, Clients], Coroutine[Any, Any, None]]


class Theatre:
    """Plays, each on a cluster of its own, over one store."""

    def __init__(self, store: RedisStore, model_path: Path) -> None:
        self._store, self._model_path = store, model_path
        self._model = ServedModel.load(model_path, MODEL, 0)
        self._tokens = Reference(
            SimulationSettings(model_path, ClusterShape(num_blocks=256)).worker("d0").engine_config()
        ).tokens

    def run(self, shape: ClusterShape, play: Play, *, started: bool = True) -> list[Reply]:
        """The replies, in the order of asking: all are right, and nothing is held behind them."""
        with World(0) as world:
            settings = SimulationSettings(self._model_path, shape)
            cluster = SimulatedCluster(world, self._store, self._model, settings, started=started)
            clients = Clients(cluster)
            world.run(cluster.client, self._played(cluster, play(cluster, clients)), LIMIT_S)
            assert world.errors == []
            assert [exit for exit in cluster.exits if exit[1]] == []
        assert clients.asked
        for prompt, reply in clients.asked:
            assert (reply.code, reply.token_ids) == (StatusCode.OK, self._tokens(prompt)), reply.details
        return [reply for _, reply in clients.asked]

    async def _played(self, cluster: SimulatedCluster, play: Coroutine[Any, Any, None]) -> None:
        await play
        registry, end = cluster.registry_of(cluster.client), cluster.world.now + SETTLE_S
        while held := leftovers(cluster) or await registry_leftovers(registry):
            assert cluster.world.now < end, held
            await asyncio.sleep(0.1)
        await registry.close()


@pytest.fixture(scope="module")
def theatre(store: RedisStore, demo_model: Path) -> Theatre:
    return Theatre(store, demo_model)


@pytest.fixture
def even_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message takes as long as any other, so that times can be compared."""
    monkeypatch.setattr("tests.simulation.network.LATENCY_S", (0.0003, 0.0003))


@pytest.mark.long
@pytest.mark.usefixtures("even_latency")
@pytest.mark.parametrize("order", list(permutations(("redis", "g0", "p0", "d0"))), ids="-".join)
def test_started_in_any_order(theatre: Theatre, order: tuple[str, ...]) -> None:
    """R5: soon ready; what is asked then is read by the prefill worker, and waits for nothing."""

    async def play(cluster: SimulatedCluster, clients: Clients) -> None:
        cluster.redis.process.kill()
        for name in order:
            await asyncio.sleep(START_EVERY_S)
            if name == "redis":
                cluster.redis.start(empty=True)
            else:
                cluster.start(name)
        async with asyncio.timeout(READY_WITHIN_S):
            while "g0" not in cluster.gateways or not cluster.gateways["g0"].readiness()[0]:
                await asyncio.sleep(0.001)
        for _ in range(1 + NUM_WARM):
            await clients.ask()

    first, *warm = theatre.run(ClusterShape(disaggregation=Disaggregation.REQUIRE), play, started=False)
    assert first.path
    assert first.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
    assert first.ttft_s <= MOST_OF_WARM * median(reply.ttft_s for reply in warm)


@pytest.mark.long
def test_an_autoscaler_moves_workers_in_and_out(theatre: Theatre) -> None:
    """R23: each second one joins and one of its role drains; its name is taken again soon."""

    async def play(cluster: SimulatedCluster, clients: Clients) -> None:
        await cluster.ready()
        before = sizes(cluster)
        async with clients.asking(ASK_EVERY_S, *LENGTHS):
            for second in range(CHURN_S):
                role, turn = "pd"[second % 2], second // 2
                joins, leaves = f"{role}{(turn + SIZE) % NUM_NAMES}", f"{role}{turn % NUM_NAMES}"
                assert joins not in cluster.processes or not cluster.processes[joins].alive
                cluster.start(joins)
                cluster.processes[leaves].deliver(cluster.workers[leaves].stop)
                await asyncio.sleep(1.0)
        await asyncio.sleep(DRAIN_S + SETTLE_S)
        assert sizes(cluster) == before  # those who were there first are there again, and nobody else

    replies = theatre.run(ClusterShape(prefills=SIZE, decodes=SIZE, num_blocks=512), play)
    migrated = {len(reply.token_ids) for reply in replies if reply.path and reply.path.migrated}
    assert migrated == {max(LENGTHS)}  # what no worker can wait for, and nothing else


@pytest.mark.long
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_restarted_at_the_same_address(theatre: Theatre, victim: str) -> None:
    """R1: each time while it has work, which goes on elsewhere at once, and each time it gets work again."""

    async def play(cluster: SimulatedCluster, clients: Clients) -> None:
        await cluster.ready()
        async with clients.asking(0.05, 20):
            for _ in range(RESTARTS):
                async with asyncio.timeout(READY_WITHIN_S):
                    while not cluster.workers[victim]._service.num_running():
                        await asyncio.sleep(0.001)
                cluster.processes[victim].kill()
                await asyncio.sleep(DOWN_S)
                cluster.start(victim)
                await cluster.ready()

    replies = theatre.run(ClusterShape(prefills=2, decodes=2, num_blocks=256), play)
    assert sum(reply.path.migrated for reply in replies if reply.path) >= RESTARTS
    took = [reply.ended_at - reply.began_at for reply in replies]
    assert max(took) < median(took) + MOST_LOST_S


@pytest.mark.long
@pytest.mark.usefixtures("even_latency")
def test_a_burst_after_a_long_pause(theatre: Theatre) -> None:
    """R30: the first one waits no longer than before the pause."""

    async def play(cluster: SimulatedCluster, clients: Clients) -> None:
        await cluster.ready()
        for _ in range(NUM_WARM):
            await clients.ask()
        await asyncio.sleep(IDLE_S)
        await asyncio.gather(*(clients.ask() for _ in range(BURST)))

    replies = theatre.run(ClusterShape(num_blocks=512), play)
    warm, burst = ([reply.ttft_s for reply in part] for part in (replies[:NUM_WARM], replies[NUM_WARM:]))
    assert min(burst) <= MOST_OF_WARM * median(warm)
