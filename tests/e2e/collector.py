"""An OTLP receiver that keeps every span, every log and every metric it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[str, Span]]] = {}
        self.logs: dict[str, LogRecord] = {}
        self.metrics: dict[str, Metric] = {}
        self._lock = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.setdefault(span.trace_id.hex(), []).append((attributes["service.name"], span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def orphans(self, trace_id: str, root: str) -> list[tuple[str, str]]:
        """Spans, with their services, whose parent has not arrived; the parent of `root` is the client's."""
        with self._lock:
            spans = self.spans.get(trace_id, [])
            ids = {span.span_id for _, span in spans}
            return [(s, span.name) for s, span in spans if span.parent_span_id not in ids and span.name != root]

    def names(self, trace_id: str) -> set[tuple[str, str]]:
        """(service, span) of every span that has arrived."""
        with self._lock:
            return {(service, span.name) for service, span in self.spans.get(trace_id, [])}


class LogCollector(logs_service_pb2_grpc.LogsServiceServicer):
    """By their traces' ids."""

    def __init__(self, logs: dict[str, LogRecord]) -> None:
        self._logs = logs

    def Export(
        self, request: logs_service_pb2.ExportLogsServiceRequest, context: grpc.ServicerContext
    ) -> logs_service_pb2.ExportLogsServiceResponse:
        for resource in request.resource_logs:
            for scope in resource.scope_logs:
                self._logs.update({log.trace_id.hex(): log for log in scope.log_records})
        return logs_service_pb2.ExportLogsServiceResponse()


class MetricCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """The latest of each, by name."""

    def __init__(self, metrics: dict[str, Metric]) -> None:
        self._metrics = metrics

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self._metrics.update({metric.name: metric for metric in scope.metrics})
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector, and its address."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(LogCollector(collector.logs), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(MetricCollector(collector.metrics), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1).wait()
