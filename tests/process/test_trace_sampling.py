"""Traces that a process records, and how many it remembers."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from tandem.process import telemetry
from tandem.process.recent_spans import SparingProvider, TraceSampling


def under(sampled: bool, is_remote: bool = True) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return trace.set_span_in_context(NonRecordingSpan(SpanContext(1, 2, is_remote, flags)), Context())


def is_recorded(sampling: TraceSampling, parent: Context | None = None, trace_id: int = 0) -> bool:
    return sampling.should_sample(parent or Context(), trace_id, "x").decision is Decision.RECORD_AND_SAMPLE


def test_without_a_collector_so_many_begin_in_a_second_whatever_clients_say() -> None:
    now = [0.0]
    sampling = TraceSampling(2, begins=True, now=lambda: now[0])
    assert [is_recorded(sampling, under(sampled=True)) for _ in range(3)] == [True, True, False]
    now[0] = 1.5
    assert [is_recorded(sampling, under(sampled=False)) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("sampled", [True, False])
def test_the_spans_of_a_trace_are_recorded_as_its_root_is(sampled: bool) -> None:
    sampling = TraceSampling(1, begins=True, now=lambda: 0.0)
    assert is_recorded(sampling, under(sampled, is_remote=False)) is sampled


@pytest.mark.parametrize("sampled", [True, False])
def test_a_worker_follows_its_gateway(sampled: bool) -> None:
    assert is_recorded(TraceSampling(1, begins=False, now=lambda: 0.0), under(sampled)) is sampled


@pytest.mark.parametrize("sampled", [True, False])
def test_with_a_collector_a_client_decides_and_else_the_ratio(sampled: bool) -> None:
    sampling = TraceSampling(None, begins=True, now=lambda: 0.0)
    assert is_recorded(sampling, under(sampled)) is sampled
    sampling.ratio = 0.25
    assert [is_recorded(sampling, trace_id=2**30 * part) for part in range(4)] == [True, False, False, False]


def ended(name: str, num_events: int) -> ReadableSpan:
    span = TracerProvider().get_tracer("t").start_span("root", context=Context(), attributes={"name": name})
    for _ in range(num_events):
        span.add_event("event")
    span.end()
    assert isinstance(span, ReadableSpan)
    return span


def test_the_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    recent, spans = telemetry.RecentSpans(max_records=10), [ended(name, 2) for name in "abcd"]
    for span in spans:
        recent.on_end(span)
    assert recent.encoded(spans[0].context.trace_id) == b""
    assert [recent.find({"name": name}) for name in "abcd"] == [None, *(span.context for span in spans[1:])]


def test_a_trace_that_is_larger_than_the_memory_is_forgotten_whole() -> None:
    recent = telemetry.RecentSpans(max_records=10)
    recent.on_end(ended("a", 20))
    assert recent.find({"name": "a"}) is None


def test_of_a_trace_that_nobody_records_no_span_is_made() -> None:
    now = [0.0]
    spans = SparingProvider(TraceSampling(2, begins=True, now=lambda: now[0])).get_tracer("t")
    made = [spans.start_span("root", Context()) for _ in range(3)]
    assert [span.is_recording() for span in made] == [True, True, False]
    assert made[-1] is trace.INVALID_SPAN
    child = spans.start_span("child", trace.set_span_in_context(made[0], Context()))
    assert child.is_recording()
    now[0] = 1.5
    assert spans.start_span("root", Context()).is_recording()


def test_a_worker_makes_spans_under_its_gateway_s_alone() -> None:
    spans = SparingProvider(TraceSampling(2, begins=False, now=lambda: 0.0)).get_tracer("t")
    with spans.start_as_current_span("alone") as span:
        assert span is trace.INVALID_SPAN
    with spans.start_as_current_span("under", under(sampled=True)) as span:
        assert span.is_recording()
        assert trace.get_current_span() is span
    with spans.start_as_current_span("under", under(sampled=False)) as span:
        assert not span.is_recording()
