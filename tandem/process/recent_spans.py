"""The spans of a process's latest traces, in bounded memory, and the choice of traces to record.

A span costs as much as several tokens, so without a collector a bounded number of traces begin per second; a worker
records the traces that its gateway records.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanContext, SpanKind, Tracer, TraceState
from opentelemetry.util.types import Attributes

# A span is one record, and each of its events another, of about 1 KiB each.
MAX_RECORDS = 20_000
MAX_EVENTS = 2048  # most events of a span; earlier events are dropped
TRACES_PER_S = 20
UNRECORDED = nullcontext(INVALID_SPAN)


class RecentSpans(SpanProcessor):
    """The latest spans; the oldest trace is dropped first. Thread-safe."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._traces: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        self._num_records = 0
        self._lock = Lock()

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            self._traces.setdefault(span.context.trace_id, []).append(span)
            self._num_records += _records(span)
            while self._num_records > self._max_records:
                _, forgotten = self._traces.popitem(last=False)
                self._num_records -= sum(map(_records, forgotten))

    def encoded(self, trace_id: int) -> bytes:
        """Returns a trace's spans, as OpenTelemetry's TracesData; no spans if the trace was dropped."""
        with self._lock:
            spans = list(self._traces.get(trace_id, ()))
        return encode_spans(spans).SerializeToString()

    def find(self, said: Mapping[str, str]) -> SpanContext | None:
        """Returns the latest span with these attributes; None without one."""
        with self._lock:
            spans = [span for spans in reversed(self._traces.values()) for span in reversed(spans)]
        holds = (span for span in spans if said.items() <= (span.attributes or {}).items())
        found = next(holds, None)
        return found.context if found else None


def _records(span: ReadableSpan) -> int:
    return 1 + len(span.events)


class TraceSampling(Sampler):
    """Records the traces that the caller's process records; of traces that begin here, the part `ratio`, at most
    `per_s`.

    Args:
        per_s: None if a collector gets the traces: then a client's own decision to record counts, too.
        begins: clients call this process, so traces begin here.
    """

    def __init__(self, per_s: int | None, begins: bool, now: Callable[[], float]) -> None:
        self.ratio = 1.0
        self._per_s, self._begins, self._now = per_s, begins, now
        self._begun: deque[float] = deque(maxlen=per_s or 1)

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, kind: SpanKind | None = None,
        attributes: Attributes = None, links: Sequence[Link] | None = None, trace_state: TraceState | None = None,
    ) -> SamplingResult:  # fmt: skip
        parent = trace.get_current_span(parent_context).get_span_context()
        decided = parent.is_valid and not (parent.is_remote and self._begins and self._per_s)
        recorded = parent.trace_flags.sampled if decided else self._begins and self._begin(trace_id)
        decision = Decision.RECORD_AND_SAMPLE if recorded else Decision.DROP
        return SamplingResult(decision, attributes, parent.trace_state)

    def begins_none(self) -> bool:
        """True while no new trace is recorded here, whatever its id."""
        if not self._begins or not self.ratio:
            return True
        return self._per_s is not None and len(self._begun) == self._per_s and self._begun[0] > self._now() - 1

    def get_description(self) -> str:
        return f"TraceSampling({self.ratio}, {self._per_s})"

    def _begin(self, trace_id: int) -> bool:
        if trace_id % 2**32 >= self.ratio * 2**32:
            return False
        if self._per_s is None:
            return True
        if self.begins_none():
            return False
        self._begun.append(self._now())
        return True


class SparingProvider(TracerProvider):
    """A provider whose tracers make no spans of unrecorded traces: the SDK's tracers make an unused span with an id, at
    a tenth of a request's cost.
    """

    def __init__(self, sampling: TraceSampling, **options: Any) -> None:
        super().__init__(sampler=sampling, **options)
        self._sampling = sampling

    def get_tracer(self, *named: Any, **options: Any) -> Tracer:
        return _SparingTracer(super().get_tracer(*named, **options), self._sampling)


class _SparingTracer(Tracer):
    def __init__(self, tracer: Tracer, sampling: TraceSampling) -> None:
        self._tracer, self._sampling = tracer, sampling

    def start_span(self, name: str, context: Context | None = None, *others: Any, **options: Any) -> Span:
        if self._is_spared(context):
            return INVALID_SPAN
        return self._tracer.start_span(name, context, *others, **options)

    def start_as_current_span(self, name: str, context: Context | None = None, *others: Any, **options: Any) -> Any:
        if self._is_spared(context):
            return UNRECORDED if context is None else trace.use_span(INVALID_SPAN)
        return self._tracer.start_as_current_span(name, context, *others, **options)

    def _is_spared(self, context: Context | None) -> bool:
        return self._sampling.begins_none() and not trace.get_current_span(context).get_span_context().is_valid
