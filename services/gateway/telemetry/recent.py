"""Finds a request's spans: the gateway's own, and those of the workers that its hops name.

A client chooses request ids and may choose trace ids, so neither proves whose a span is. The root span does, and its
descendants belong to its request; equal ids of another tenant are not found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from services.gateway.access import Caller
from services.gateway.errors import GatewayError, NotKept
from services.gateway.telemetry.rows import OwnedSpan, rows_of
from services.gateway.workers import WorkerConnection
from tandem.catalogue.spans import TENANT
from tandem.process import telemetry
from tandem.v1 import process_pb2

WORKER_WAIT_S = 2.0


class RecentRequests:
    """The traces of requests that ended last."""

    def __init__(self, spans: telemetry.RecentSpans, connections: Callable[[], list[WorkerConnection]]) -> None:
        self._spans, self._connections = spans, connections

    async def trace(self, request_id: str, client: Caller) -> dict[str, Any]:
        """Returns a request's rows, and the workers whose part is missing.

        Raises:
            NotKept: the request is forgotten, or another tenant's.
        """
        said = {"gen_ai.request.id": request_id}
        root = self._spans.find(said if client.manages_models else said | {TENANT: client.tenant})
        if root is None:
            raise NotKept(f"a trace of request {request_id!r}")
        own = _below(_spans_of(self._spans.encoded(root.trace_id)), root.span_id.to_bytes(8))
        workers = {one.attributes["tandem.worker"] for one in own if "tandem.worker" in one.attributes}
        hops = [one for one in self._connections() if one.info.worker_id in workers]
        trace_id = root.trace_id.to_bytes(16)
        answers = await asyncio.gather(*(self._of_worker(connection, trace_id) for connection in hops))
        spans = _below([*own, *(span for answer in answers for span in answer)], root.span_id.to_bytes(8))
        missing = sorted(workers - {str(span.attributes.get("tandem.worker")) for span in spans if not span.is_hop})
        return {"trace_id": trace_id.hex(), "missing": missing, "rows": rows_of(spans)}

    async def _of_worker(self, connection: WorkerConnection, trace_id: bytes) -> list[OwnedSpan]:
        """Returns a worker's spans of a trace; none if it does not answer."""
        request = process_pb2.RecentSpansRequest(trace_id=trace_id)
        try:
            answer = await connection.call(connection.traces.RecentSpans, request, timeout=WORKER_WAIT_S)
        except GatewayError:
            return []
        return _spans_of(answer.traces)


def _spans_of(traces: bytes) -> list[OwnedSpan]:
    return [
        OwnedSpan.of(resource.resource, span)
        for resource in TracesData.FromString(traces).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _below(spans: Iterable[OwnedSpan], root: bytes) -> list[OwnedSpan]:
    """Returns the root and its descendants."""
    children: dict[bytes, list[OwnedSpan]] = {}
    found, known = [], set()
    for one in spans:
        children.setdefault(one.span.parent_span_id, []).append(one)
        if one.span.span_id == root:
            found.append(one)
    for one in found:
        if one.span.span_id not in known:
            known.add(one.span.span_id)
            found += children.get(one.span.span_id, ())
    return found
