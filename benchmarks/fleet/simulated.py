"""A fleet in made-up time: real gateways, workers and registry over a simulated network, in one process.

A run of twenty seconds takes about seven, and two of them are equal: what a policy loses is its own, not the machine's.
What Python itself takes is in no figure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from benchmarks.fleet.processes import NullFleet, model_folder
from benchmarks.routing import POLICIES
from benchmarks.traffic import TIMEOUT_S, Replayed, TraceRequest, replay_through
from services.gateway.model.served import ServedModel
from services.gateway.settings import Disaggregation
from tandem.local import RedisServer
from tandem.v1 import llm_pb2_grpc
from tests.simulation.cluster import GRPC_PORT, MODEL, TRANSFER_PORT, ClusterShape, SimulatedCluster, SimulationSettings
from tests.simulation.grpc_client import Channel
from tests.simulation.redis import RedisStore
from tests.simulation.world import World

LIMIT_S = 900.0
LOOK_S = 0.05
T = TypeVar("T")
# Given the stub of the fleet's one gateway, and the model's name there.
Work = Callable[[Any, str], Coroutine[Any, Any, T]]


class FleetSettings(SimulationSettings):
    def __init__(self, fleet: NullFleet) -> None:
        policy, disaggregation = fleet.gateways[0]
        shape = ClusterShape(
            prefills=fleet.prefill, decodes=fleet.decode, disaggregation=Disaggregation(disaggregation),
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        super().__init__(model_folder(), shape)
        self.make_router = POLICIES[policy]
        self._fleet = fleet

    def _gateway(self, name: str) -> dict[str, Any]:
        return super()._gateway(name) | dict(self._fleet.gateway_settings)

    def _worker(self, name: str) -> dict[str, Any]:
        fleet, prefills = self._fleet, name.startswith("p")
        seqs = {} if prefills or fleet.decode_seqs is None else {"max_num_seqs": fleet.decode_seqs}
        return {
            "worker_id": name, "transfer_port": TRANSFER_PORT, "transports": ("memory",), "engine": "null",
            "num_blocks": fleet.prefill_blocks if prefills else fleet.decode_blocks, "null_step": fleet.step_time,
            **seqs,
        }  # fmt: skip


def simulate(fleet: NullFleet, warm_up: Sequence[TraceRequest], requests: Sequence[TraceRequest]) -> list[Replayed]:
    """As `replay` through the fleet's one gateway; what the warm-up cached is not found again.

    Raises:
        RuntimeError: something in the fleet failed.
    """

    async def replays(stub: Any, model: str) -> list[Replayed]:
        now = asyncio.get_running_loop().time
        await replay_through(warm_up, [stub], model, "warm-up", now)
        return await replay_through(requests, [stub], model, "", now)

    return in_made_up_time(fleet, replays)


def in_made_up_time(fleet: NullFleet, work: Work[T]) -> T:
    """The result of `work`, begun when the fleet is ready.

    Raises:
        RuntimeError: something in the fleet failed.
    """
    settings, model = FleetSettings(fleet), ServedModel.load(model_folder(), MODEL, 0)
    with RedisServer.start() as server, RedisStore(server.port) as store, World(0) as world:
        cluster = SimulatedCluster(world, store, model, settings)
        result = world.run(cluster.client, _when_ready(cluster, work), LIMIT_S)
        if world.errors or cluster.exits:
            raise RuntimeError(f"{world.errors} {cluster.exits}")
        return result


async def _when_ready(cluster: SimulatedCluster, work: Work[T]) -> T:
    await cluster.ready()
    while cluster.gateways["g0"].readiness()[1]["decode_workers"] < cluster.shape.decodes:
        await asyncio.sleep(LOOK_S)
    channel: Any = Channel(cluster.network, cluster.client, f"g0:{GRPC_PORT}")
    stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
    return await work(stub, MODEL)
