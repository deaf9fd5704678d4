"""Does a worker hold exactly what its requests need? Asked of a live worker, by `tandem doctor --integrity`.

violations   a block that none or too many hold, or a sequence in the engine that no request of this worker accounts for
held         what is held at this moment: sequences, blocks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from grpc import aio

from tandem import rpc
from tandem.engine import Engine
from tandem.v1 import process_pb2, process_pb2_grpc
from tandem.worker.engine_port import EnginePort

# Requests come and go while both sides are looked at: only what is unaccounted for twice is a leak.
AGAIN_S = 0.5


class IntegrityService(process_pb2_grpc.IntegrityServiceServicer):
    """`accounted()`: ids of the requests that run here, those that are just being released included."""

    def __init__(self, engine: EnginePort, accounted: Callable[[], Collection[str]]) -> None:
        self._engine, self._accounted = engine, accounted
        self.servicer = rpc.Servicer(
            "tandem.v1.IntegrityService", self, process_pb2_grpc.add_IntegrityServiceServicer_to_server
        )

    async def CheckIntegrity(
        self, request: process_pb2.CheckIntegrityRequest, context: aio.ServicerContext[Any, Any]
    ) -> process_pb2.CheckIntegrityResponse:
        leaked = await self._unaccounted()
        if leaked:
            await asyncio.sleep(AGAIN_S)
            leaked &= await self._unaccounted()
        broken = await self._engine.call(_broken)
        stats = await self._engine.call(lambda engine: engine.stats())
        return process_pb2.CheckIntegrityResponse(
            violations=[*broken, *(f"{request_id}: in the engine, but no request's" for request_id in sorted(leaked))],
            num_sequences=stats.num_waiting + stats.num_running + stats.num_reserved,
            num_blocks=stats.num_blocks - stats.free_blocks,
        )

    async def _unaccounted(self) -> set[str]:
        held = set(await self._engine.call(lambda engine: engine.request_ids()))
        return held - set(self._accounted())


def _broken(engine: Engine) -> list[str]:
    try:
        engine.check_integrity()
    except AssertionError as error:
        return [str(error)]
    return []
