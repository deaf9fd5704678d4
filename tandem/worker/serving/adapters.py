"""LoRA adapters of a live worker: read when an operator loads one, dropped when it is unloaded.

Each request names its adapter's folder and revision: a worker that has not read the adapter yet, such as one started
later, reads it then.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc import aio

from tandem import rpc
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.worker.engine import EnginePort
from tandem.worker.errors import SequenceFailed
from tandem.worker.serving import conversion


class AdapterService(worker_pb2_grpc.AdapterServiceServicer):
    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self.servicer = rpc.Servicer(
            "tandem.v1.AdapterService", self, worker_pb2_grpc.add_AdapterServiceServicer_to_server
        )

    async def ReadAdapter(
        self, request: worker_pb2.ReadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ReadAdapterResponse:
        try:
            ref = await self._engine.read_adapter(request.name, request.path)
        except SequenceFailed as error:
            raise rpc.Refused(getattr(grpc.StatusCode, error.code), str(error)) from None
        return worker_pb2.ReadAdapterResponse(adapter=conversion.adapter_to_proto(ref))

    async def DropAdapter(
        self, request: worker_pb2.DropAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DropAdapterResponse:
        self._engine.drop_adapter(request.revision)
        return worker_pb2.DropAdapterResponse()
