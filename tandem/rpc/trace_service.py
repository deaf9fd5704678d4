"""A gRPC service that returns its process's recent spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc import aio

from tandem.rpc.endpoints import Servicer
from tandem.v1 import process_pb2, process_pb2_grpc


class TraceService(process_pb2_grpc.TraceServiceServicer):
    def __init__(self, spans: Callable[[int], bytes]) -> None:
        """`spans`: returns a trace's spans, as OpenTelemetry's TracesData."""
        self._spans = spans
        self.servicer = Servicer("tandem.v1.TraceService", self, process_pb2_grpc.add_TraceServiceServicer_to_server)

    async def RecentSpans(
        self, request: process_pb2.RecentSpansRequest, context: aio.ServicerContext[Any, Any]
    ) -> process_pb2.RecentSpansResponse:
        return process_pb2.RecentSpansResponse(traces=self._spans(int.from_bytes(request.trace_id[:16])))
