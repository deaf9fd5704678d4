"""Traces and logs. Only this module and recent_spans.py use the OpenTelemetry SDK; all others use its API.

The process keeps its latest traces. Traces are also exported by OTLP if OpenTelemetry's variables name an endpoint
(OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT). Every log line is one structured event that
carries the trace and span ids of the request it belongs to. Logging never raises and never blocks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace
from opentelemetry._logs import set_logger_provider
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from tandem.process.log_output import LogOutput, descriptor_of
from tandem.process.recent_spans import MAX_EVENTS, TRACES_PER_S, SparingProvider, TraceSampling
from tandem.process.recent_spans import RecentSpans as RecentSpans

if TYPE_CHECKING:  # Imported at run time only if needed, as their import takes longer than the rest of this file.
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import LogRecordExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Traces(Enum):
    """A process's role in tracing."""

    NONE = 0
    BEGUN = 1  # clients call the process, so traces begin there
    FOLLOWED = 2  # only the cluster's processes call it, and their traces continue there


class Telemetry:
    """A process's telemetry, which it has to shut down at its end, so that the last spans and lines are sent."""

    def __init__(
        self, logs: LogOutput, recent: RecentSpans, sampling: TraceSampling | None = None,
        *providers: TracerProvider | LoggerProvider | MeterProvider,
    ) -> None:  # fmt: skip
        self.recent = recent
        self._sampling = sampling
        self._logs = logs
        self._providers = providers
        self.together = logs.together  # writes one thread's lines together

    def tune(self, log_level: str, trace_sampling: float) -> None:
        """Changes this process's log level and trace sampling."""
        structlog.configure(wrapper_class=_filtering(log_level))
        if self._sampling is not None:
            self._sampling.ratio = trace_sampling

    def close(self) -> None:
        for provider in self._providers:
            provider.force_flush(2000)
            provider.shutdown()
        self._logs.close()


def set_up(
    service: str, instance: str, log_level: str = "info", traces: Traces = Traces.NONE,
    dumps: Callable[..., str] = json.dumps,
) -> Telemetry:  # fmt: skip
    """Configures logs and traces of this process. `service` becomes service.name unless OTEL_SERVICE_NAME is set.

    Args:
        dumps: makes the JSON of a log line, as json.dumps does.
    """
    logs, recent = _set_up_logs(service, instance, log_level, dumps), RecentSpans()
    if traces is Traces.NONE:
        return Telemetry(logs, recent)
    attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service), "service.instance.id": instance}
    collected = any(os.environ.get(name) for name in ENDPOINT_VARIABLES)
    own = TraceSampling(None if collected else TRACES_PER_S, traces is Traces.BEGUN, time.monotonic)
    resource, limits = Resource.create(attributes), SpanLimits(max_events=MAX_EVENTS)
    options: dict[str, Any] = {"resource": resource, "span_limits": limits}
    chosen_elsewhere = collected and os.environ.get("OTEL_TRACES_SAMPLER")
    provider = TracerProvider(**options) if chosen_elsewhere else SparingProvider(own, **options)
    provider.add_span_processor(recent)
    if collected:
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
    trace.set_tracer_provider(provider)
    records, metrics = _set_up_records(provider.resource), _set_up_metrics(provider.resource)
    return Telemetry(logs, recent, own, provider, *records, *metrics)


def _set_up_records(resource: Resource) -> Iterator[LoggerProvider]:
    """Exports records of requests by OTLP, if OpenTelemetry's variable asks for it. Yields the provider."""
    if os.environ.get("OTEL_LOGS_EXPORTER") == "otlp":
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        provider = LoggerProvider(resource)
        provider.add_log_record_processor(BatchLogRecordProcessor(_log_exporter()))
        set_logger_provider(provider)
        yield provider


def _set_up_metrics(resource: Resource) -> Iterator[MeterProvider]:
    """Exports GenAI metrics by OTLP, if OpenTelemetry's variable asks for it. Yields the provider."""
    if os.environ.get("OTEL_METRICS_EXPORTER") == "otlp":
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        provider = MeterProvider([PeriodicExportingMetricReader(_metric_exporter())], resource)
        set_meter_provider(provider)
        yield provider


def _by_http(what: str) -> bool:
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{what}_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return protocol in ("http/protobuf", "http/json")


def _log_exporter() -> LogRecordExporter:
    if _by_http("LOGS"):
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogExporter

        return HttpLogExporter()
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogExporter

    return GrpcLogExporter()


def _metric_exporter() -> MetricExporter:
    if _by_http("METRICS"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter

        return HttpMetricExporter()
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

    return GrpcMetricExporter()


def _exporter() -> SpanExporter:
    if _by_http("TRACES"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter()


def _set_up_logs(service: str, instance: str, level: str, dumps: Callable[..., str]) -> LogOutput:
    output = LogOutput(descriptor_of(sys.__stderr__), _lost)
    human = output.isatty()
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)

    def name_process(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {"service": service, "instance": instance, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _add_trace_ids,
            name_process,
            *(() if human else (structlog.processors.format_exc_info,)),
            console if human else structlog.processors.JSONRenderer(dumps),
        ],
        wrapper_class=_filtering(level),
        logger_factory=lambda *_: _Lines(output),
    )
    logging.basicConfig(handlers=[_Library()], force=True)
    logging.captureWarnings(True)
    return output


def _filtering(level: str) -> type[structlog.typing.FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])


class _Lines:
    """structlog's output. structlog's own loggers lock, so a finalizer that logs within a log call would deadlock."""

    def __init__(self, output: LogOutput) -> None:
        self._output = output

    def msg(self, line: str) -> None:
        self._output.write(f"{line}\n")

    debug = info = warning = error = critical = exception = msg


class _Library(logging.Handler):
    """Turns libraries' log records into Tandem's log events."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as error:
            message = f"{record.msg} ({error!r} with {record.args!r})"
        level = min(record.levelno // 10 * 10, logging.CRITICAL)  # structlog has no levels in between
        structlog.get_logger().log(level, message, logger=record.name, exc_info=record.exc_info)


def _lost(lines: int, reason: str) -> str:
    line = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0))
    return f"{line.warning('log lines lost', lines=lines, reason=reason)}\n"


def _add_trace_ids(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = f"{span.trace_id:032x}"
        event["span_id"] = f"{span.span_id:016x}"
    return event
