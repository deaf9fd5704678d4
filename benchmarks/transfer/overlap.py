"""How much of a KV transfer a request waits for: what the trace of real workers says of one long prompt.

gateway, prefill worker, decode worker, each a process --spans, by OTLP--> this process
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.load import Job
from benchmarks.models import Shape, made
from benchmarks.peers import tandem

BOUND_S = 30.0
SHARE = 0.05  # of the prefill's time, that a transfer may be waited for


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians over the rounds, in seconds; the names are those of the kv.transfer span's attributes."""

    transport: str
    prefill_s: float
    push_s: float
    exposed_s: float
    tail_s: float
    overlap_ratio: float

    def bound_s(self, layer_s: float) -> float:
        """The longest that a transfer may be waited for where one layer's push takes `layer_s`."""
        return max(layer_s, SHARE * self.prefill_s)


class Spans(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans of the prefill worker, as they come."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {"prefill": [], "kv.transfer": []}
        self._changed = threading.Condition()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        with self._changed:
            for span in (span for scope in scopes if scope.scope.name == "tandem.prefill" for span in scope.spans):
                self._spans[span.name].append(span)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, count: int) -> list[tuple[Span, Span]]:
        """The last `count` requests' prefill and kv.transfer spans. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(len(s) >= count for s in self._spans.values()), BOUND_S):
                raise TimeoutError(f"not {count} requests' spans came in {BOUND_S} s")
            prefills, transfers = (spans[-count:] for spans in self._spans.values())
        by_id = {span.span_id: span for span in prefills}
        return [(by_id[transfer.parent_span_id], transfer) for transfer in transfers]


def overlap(shape: Shape, transport: str, *, prompt_tokens: int, rounds: int) -> Overlap:
    """Reads `rounds` prompts, one after the other, each of its own tokens; the cluster's first request not counted."""
    peer = tandem(
        f"transfer-{transport}", "", "--prefill=1", "--decode=1", f"--transports={transport}",
        "--disaggregation=require",
    )  # fmt: skip
    with collected() as (spans, endpoint):
        traced = replace(peer, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"})
        with traced.running(made(shape)) as client:
            for seed in range(rounds):
                prompt = random.Random(seed).choices(range(300, shape.vocab - 300), k=prompt_tokens)
                asyncio.run(client.send(Job(prompt, 4)))
            found = [_figures(transport, *pair) for pair in spans.wait(1 + rounds)[1:]]
    names = ("prefill_s", "push_s", "exposed_s", "tail_s", "overlap_ratio")
    return Overlap(transport, *(statistics.median(getattr(one, name) for one in found) for name in names))


@contextmanager
def collected() -> Iterator[tuple[Spans, str]]:
    """An OTLP receiver, and the endpoint that spans go to."""
    server, spans = grpc.server(futures.ThreadPoolExecutor(2)), Spans()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield spans, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1).wait()


def _figures(transport: str, prefill: Span, transfer: Span) -> Overlap:
    said: dict[str, Any] = {a.key.removeprefix("kv.transfer."): a.value.double_value for a in transfer.attributes}
    seconds = (prefill.end_time_unix_nano - prefill.start_time_unix_nano) / 1e9
    return Overlap(transport, seconds, *(said[name] for name in ("push_s", "exposed_s", "tail_s", "overlap_ratio")))
