"""Spans of one request, through OpenTelemetry's API alone.

chat {model}  (SERVER; GenAI semantic conventions, and vLLM's names beside them)
 ├─ queue      until it is its turn: class, tenant, wait
 ├─ route      which pair, and why
 ├─ reserve    blocks on the decode worker        (CLIENT)
 ├─ prefill    until the prefill worker answers   (CLIENT; the worker's span is the child)
 ├─ decode     from the reservation to the last token; the decode worker's span is the child
 └─ migration  from a worker's loss until tokens come again, linked to the span that it ended; then route … decode anew
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, Tracer

from services.gateway.errors import GatewayError, WorkerLost
from services.gateway.generation.request import Generation
from tandem.catalogue.spans import ERROR, HINT, TENANT, TRUNCATED
from tandem.v1 import llm_pb2

PROVIDER, W3C = "tandem", "traceparent"
UNRECORDED = nullcontext(INVALID_SPAN)
# Attributes of the GenAI semantic conventions.
SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty"}


def tracer() -> Tracer:
    return trace.get_tracer("tandem.gateway")


def incoming(headers: Mapping[str, str]) -> Context:
    """Returns the caller's trace context."""
    return Context() if _carriers(propagate.get_global_textmap()).isdisjoint(headers) else propagate.extract(headers)


@cache
def _carriers(propagator: TextMapPropagator) -> frozenset[str]:
    """Returns the headers that may carry a trace context."""
    return frozenset(propagator.fields)


def outgoing(span: Span) -> dict[str, str]:
    """Returns the headers that carry this span's context to a worker; empty if nothing is traced."""
    found = span.get_span_context()
    if not found.is_valid:
        return {}
    if not found.trace_flags.sampled and W3C in _carriers(propagate.get_global_textmap()):  # the usual case
        return {W3C: f"00-{found.trace_id:032x}-{found.span_id:016x}-00"}
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=under(span))
    return carrier


def kept_trace(span: Span) -> str:
    """Returns the span's trace id if the trace is kept, else ""."""
    found = span.get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid and found.trace_flags.sampled else ""


def start_root(spans: Tracer, request: Generation) -> Span:
    model = request.model.name
    span = spans.start_span(f"{request.operation} {model}", context=request.parent, kind=SpanKind.SERVER)
    if not span.is_recording():
        return span
    given = {name: value for name, value in request.given.items() if name in SAMPLING}
    if (seed := given.get("seed", 0)) >= 2**63:  # attributes are signed 64-bit; this is the same seed
        given["seed"] = seed - 2**64
    span.set_attributes({f"gen_ai.request.{name}": value for name, value in given.items()})
    span.set_attributes(
        {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.id": request.request_id,
            TENANT: request.tenant,
            "gen_ai.response.model": request.model.via.model if request.model.via else model,
            "gen_ai.request.choice.count": request.num_choices,
            "gen_ai.request.n": request.n,
        }
    )
    if request.sampling.stop:
        span.set_attribute("gen_ai.request.stop_sequences", list(request.sampling.stop))
    return span


def refused(spans: Tracer, headers: Mapping[str, str], request_id: str, error: GatewayError, after_s: float) -> None:
    """Record a root span for a request that was refused `after_s` after its arrival."""
    span = spans.start_span("refused", context=incoming(headers), kind=SpanKind.SERVER)
    if span.is_recording():
        span.set_attributes(
            {
                "gen_ai.request.id": request_id,
                "http.response.status_code": error.status,
                "rpc.grpc.status_code": error.grpc.value[0],
                "tandem.refused.after_s": after_s,
            }
        )
        hint(span, error.status, is_slow=False)
        fail(span, error, error.type)
    span.end()


def note_first(span: Span, after_s: float) -> None:
    """Note a request's first token, `after_s` after its arrival."""
    span.add_event("first_token")
    span.set_attribute("gen_ai.latency.time_to_first_token", after_s)


def set_usage(span: Span, usage: llm_pb2.Usage) -> None:
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "tandem.speculative.proposed_tokens": usage.proposed_tokens,
            "tandem.speculative.accepted_tokens": usage.accepted_tokens,
        }
    )


def fail(span: Span, error: BaseException, kind: str) -> None:
    """Mark a span as failed."""
    span.set_attribute(ERROR, kind)
    span.set_status(Status(StatusCode.ERROR, str(error) or kind))


def truncate(span: Span) -> None:
    """Mark a span that ends before its phase is over."""
    span.set_attribute(TRUNCATED, True)


def hint(span: Span, status: int, is_slow: bool) -> None:
    """Mark a trace that tail sampling should keep."""
    if status >= 500 or is_slow:
        span.set_attribute(HINT, "failed" if status >= 500 else "slow")


def child(
    spans: Tracer, name: str, parent: Span, kind: SpanKind = SpanKind.INTERNAL,
    is_at_fault: Callable[[Span], bool] = lambda span: True,
) -> AbstractContextManager[Span]:  # fmt: skip
    """Returns a span for a block, failed if the block fails; the parent itself if that is not recorded.

    Args:
        is_at_fault: True if a failure of the block is this span's own, not that of a span within.
    """
    if parent is INVALID_SPAN:
        return UNRECORDED
    if not parent.is_recording():
        return nullcontext(parent)
    return _Child(spans.start_span(name, context=under(parent), kind=kind), is_at_fault)


class _Child:
    __slots__ = ("_is_at_fault", "_span")

    def __init__(self, span: Span, is_at_fault: Callable[[Span], bool]) -> None:
        self._span, self._is_at_fault = span, is_at_fault

    def __enter__(self) -> Span:
        return self._span

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # The reader may stop early, for example at a stop string.
        if error is not None and not isinstance(error, GeneratorExit):
            truncate(self._span)
            if isinstance(error, Exception) and self._is_at_fault(self._span):
                fail(self._span, error, error.type if isinstance(error, GatewayError) else type(error).__name__)
        self._span.end()


def migration(spans: Tracer, parent: Span, lost: Span | None, error: WorkerLost, num_written: int) -> Span:
    span = spans.start_span("migration", under(parent), links=[Link(lost.get_span_context())] if lost else [])
    span.set_attributes(
        {
            "tandem.migration.from": error.worker_id,
            "tandem.migration.reason": error.message,
            "tandem.migration.written_tokens": num_written,
        }
    )
    return span


def under(span: Span) -> Context:
    """Returns a context whose spans are children of this one."""
    return trace.set_span_in_context(span, Context())
