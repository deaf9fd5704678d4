"""A gRPC service that returns a process's integrity report."""

from __future__ import annotations

from typing import Any

from grpc import aio

from tandem.process import Look, lasting
from tandem.rpc.endpoints import Servicer
from tandem.v1 import process_pb2, process_pb2_grpc


class IntegrityService(process_pb2_grpc.IntegrityServiceServicer):
    def __init__(self, look: Look) -> None:
        self._look = look
        self.servicer = Servicer(
            "tandem.v1.IntegrityService", self, process_pb2_grpc.add_IntegrityServiceServicer_to_server
        )

    async def CheckIntegrity(
        self, request: process_pb2.CheckIntegrityRequest, context: aio.ServicerContext[Any, Any]
    ) -> process_pb2.CheckIntegrityResponse:
        report = await lasting(self._look)
        return process_pb2.CheckIntegrityResponse(violations=report.violations, held=report.held)
