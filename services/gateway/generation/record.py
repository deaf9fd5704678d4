"""One record for each request that ended, without prompt, answer or key: a log line, `request` or `request refused`,
and for the console a memory of the latest.

a request ends ──> add ──> write, with others: a line each, by OTLP too where OpenTelemetry's own variables ask for it

What ends within WRITE_S is written together: one by one, each time between other work, a record costs twice as much.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber, get_logger
from opentelemetry.trace import Span

from services.gateway.admission import PriorityClass
from services.gateway.errors import GatewayError
from services.gateway.generation.choice import REASONS
from services.gateway.generation.request import Generation
from services.gateway.metrics import PATHS
from tandem.metrics import ITL
from tandem.v1 import llm_pb2

if TYPE_CHECKING:
    from services.gateway.generation.answer import Answer

log = structlog.get_logger("tandem.requests")
MAX_RECORDS = 512
# Written so soon, and so many at once: half a millisecond's work.
WRITE_S, AT_ONCE = 0.05, 32
Fields = dict[str, Any]
Together = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class Ending:
    """How a request ended.

    `outcome` is "ok", "client_left" or the error's type; `first_s` from its arrival to its first token, if one came;
    `whole_s` from its arrival to its end; `trace_id` 0 where it has no trace.
    """

    status: int
    outcome: str
    first_s: float | None
    whole_s: float
    trace_id: int


class RequestRecords:
    """Those of the requests that ended last. `write` once more at the end, so that none is missed."""

    def __init__(self, most: int = MAX_RECORDS, together: Together = nullcontext) -> None:
        """`together`: a block whose log lines are written at its end."""
        self._together = together
        self._kept: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=most)
        self._ended: list[tuple[float, str, Callable[[], Fields], Span | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._otel = get_logger("tandem.requests")

    def add(self, event: str, fields: Callable[[], Fields], span: Span | None = None) -> None:
        """One more, of a request that ends now.

        Args:
            fields: gives them, when it is written; it may count the request, too.
        """
        loop = asyncio.get_running_loop()
        self._ended.append((loop.time(), event, fields, span))
        if self._timer is None:
            self._timer = loop.call_later(WRITE_S, self.write)
        if len(self._ended) >= AT_ONCE:
            self.write()

    def write(self) -> None:
        """All that have ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        with self._together():
            line = log.bind()  # once for all of them
            for at, event, fields, span in ended:
                try:
                    told = fields()
                    self._kept.append((at, told))
                    line.info(event, **told)
                    if self._otel.enabled(severity_number=SeverityNumber.INFO, event_name=event):
                        self._emit(event, told, span)
                except Exception as error:  # a bug, which must not reach the request that ends just now
                    log.error("a request could not be recorded", exc_info=error)

    def _emit(self, event: str, told: Fields, span: Span | None) -> None:
        context = trace.set_span_in_context(span) if span is not None else None
        number = SeverityNumber.INFO
        self._otel.emit(
            LogRecord(context=context, severity_number=number, body=event, attributes=told, event_name=event)
        )

    def latest(self, most: int, tenant: str | None) -> list[Fields]:
        """The last one first, each with `ago_s`; only `tenant`'s, where one is given."""
        self.write()
        now = asyncio.get_running_loop().time()
        found = (one for one in reversed(self._kept) if tenant is None or one[1].get("tenant") == tenant)
        return [{**fields, "ago_s": round(now - at, 3)} for at, fields in islice(found, most)]


def fields_of(answer: Answer, end: Ending, usage: llm_pb2.Usage) -> Fields:
    """Returns those of an answer's record."""
    request, path = answer.request, answer.path
    gaps, mailboxes = _gaps(answer), [choice.mailbox for choice in answer.choices if choice.mailbox]
    writing_s = 0.0 if end.first_s is None else end.whole_s - end.first_s
    fields: Fields = {
        **_asked(request),
        "trace_id": f"{end.trace_id:032x}" if end.trace_id else None,
        "status": end.status,
        "outcome": end.outcome,
        "finish_reasons": [REASONS.get(choice.text.finish_reason, "error") for choice in answer.choices],
        "path": PATHS.get(path.kind, "none"),
        "path_reason": path.reason,
        "prefill_worker": path.prefill_worker,
        "decode_worker": path.decode_worker,
        "transport": path.transport,
        "transfer_bytes": sum(choice.path.transfer_bytes for choice in answer.choices),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "queue_s": _rounded(max(choice.queued_s for choice in answer.choices)),
        "ttft_s": _rounded(end.first_s),
        "itl_p50_s": _quantile(gaps, 0.5),
        "itl_p99_s": _quantile(gaps, 0.99),
        "tokens_per_s": round(usage.completion_tokens / writing_s, 1) if writing_s else None,
        "whole_s": _rounded(end.whole_s),
        "batch_size": max(mailbox.batch_size for mailbox in mailboxes) if mailboxes else 0,
        "kv_usage": round(max(mailbox.kv_usage for mailbox in mailboxes), 4) if mailboxes else 0.0,
        "migrations": sum(choice.migrated for choice in answer.choices),
        "cost": _cost(request, usage),
    }
    return {name: value for name, value in fields.items() if value not in (None, "", 0.0)}


def is_slow(answer: Answer, first_s: float | None) -> bool:
    """True where it missed a target: its first token came later, or one of a hundred gaps is longer."""
    targets, gap_s = answer.request.targets, _quantile(_gaps(answer), 0.99)
    is_late = first_s is not None and targets.ttft_s is not None and first_s > targets.ttft_s
    return is_late or (gap_s is not None and targets.itl_s is not None and gap_s > targets.itl_s)


def _gaps(answer: Answer) -> list[int]:
    """How many of the times between tokens lie in each bucket of the histogram of them."""
    if len(answer.choices) == 1:
        return answer.choices[0].gaps
    return [sum(counts) for counts in zip(*(choice.gaps for choice in answer.choices), strict=True)]


def _cost(request: Generation, usage: llm_pb2.Usage) -> float:
    """The sum by its tier's prices; who got no token pays nothing."""
    used = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    return request.client.tier.cost(*used) if usage.completion_tokens else 0.0


def _asked(request: Generation) -> dict[str, str]:
    via = request.model.via
    return {
        "answered_by": via.model if via else "",
        "request_id": request.request_id,
        "operation": request.operation,
        "model": request.model.name,
        "tenant": request.tenant,
        "key_id": request.client.key_id,
        "priority_class": PriorityClass.of(request.priority).label,
    }


def record_refused(records: RequestRecords, request_id: str, error: GatewayError, after_s: float) -> None:
    """It failed before anything was asked of the cluster. The error may quote it, so its words are left out."""
    told = {"request_id": request_id, "status": error.status, "outcome": error.type, "whole_s": _rounded(after_s)}
    told |= {"code": error.code} if error.code else {}
    records.add("request refused", lambda: told)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _quantile(gaps: list[int], share: float) -> float | None:
    """The bound of vLLM's histogram that so many of the gaps do not pass; none of those beyond its last."""
    if not (total := sum(gaps)):
        return None
    at = bisect_left(list(accumulate(gaps)), share * total)
    return ITL[at] if at < len(ITL) else None
