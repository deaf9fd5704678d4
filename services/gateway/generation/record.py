"""One record for each request at its end, without prompt, answer or key: a log line, `request` or `request refused`,
and for the console a memory of the latest."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
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

if TYPE_CHECKING:
    from services.gateway.generation.answer import Answer

log = structlog.get_logger("tandem.requests")
MAX_RECORDS = 512


class RequestRecords:
    """Those of the requests that ended last."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self._kept: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=most)

    def add(self, fields: Mapping[str, Any]) -> None:
        self._kept.append((asyncio.get_running_loop().time(), fields))

    def latest(self, most: int, tenant: str | None) -> list[dict[str, Any]]:
        """The last one first, each with `ago_s`; only `tenant`'s, where one is given."""
        now = asyncio.get_running_loop().time()
        found = (one for one in reversed(self._kept) if tenant is None or one[1].get("tenant") == tenant)
        return [{**fields, "ago_s": round(now - at, 3)} for at, fields in islice(found, most)]


def record_answer(answer: Answer, span: Span, status: int, outcome: str, first_s: float | None, whole_s: float) -> None:
    """
    Args:
        outcome: "ok", "client_left" or the error's type.
        first_s: from the request's arrival to its first token, if one came.
        whole_s: from its arrival to now.
    """
    request, usage, path = answer.request, answer.usage, answer.path
    trace_id = span.get_span_context().trace_id
    gaps, mailboxes = _gaps(answer), [choice.mailbox for choice in answer.choices if choice.mailbox]
    writing_s = 0.0 if first_s is None else whole_s - first_s
    fields: dict[str, Any] = {
        **_asked(request),
        "trace_id": f"{trace_id:032x}" if trace_id else None,
        "status": status,
        "outcome": outcome,
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
        "ttft_s": _rounded(first_s),
        "itl_p50_s": _quantile(gaps, 0.5),
        "itl_p99_s": _quantile(gaps, 0.99),
        "tokens_per_s": round(usage.completion_tokens / writing_s, 1) if writing_s else None,
        "whole_s": _rounded(whole_s),
        "batch_size": max(mailbox.batch_size for mailbox in mailboxes) if mailboxes else 0,
        "kv_usage": round(max(mailbox.kv_usage for mailbox in mailboxes), 4) if mailboxes else 0.0,
        "migrations": sum(choice.migrated for choice in answer.choices),
        "cost": _cost(answer),
    }
    told = {name: value for name, value in fields.items() if value not in (None, "", 0.0)}
    answer.records.add(told)
    _record("request", told, span)


def is_slow(answer: Answer, first_s: float | None) -> bool:
    """True where it missed a target: its first token came later, or one of a hundred gaps is longer."""
    targets, gap_s = answer.request.targets, _quantile(_gaps(answer), 0.99)
    is_late = first_s is not None and targets.ttft_s is not None and first_s > targets.ttft_s
    return is_late or (gap_s is not None and targets.itl_s is not None and gap_s > targets.itl_s)


def _gaps(answer: Answer) -> list[int]:
    """How many of the times between tokens lie in each bucket of the histogram of them."""
    return [sum(counts) for counts in zip(*(choice.gaps for choice in answer.choices), strict=True)]


def _cost(answer: Answer) -> float:
    """The sum by its tier's prices; who got no token pays nothing."""
    usage, tier = answer.usage, answer.request.client.tier
    used = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    return tier.cost(*used) if usage.completion_tokens else 0.0


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
    records.add(told)
    _record("request refused", told, None)


def _record(event: str, fields: dict[str, Any], span: Span | None) -> None:
    """A line of the log; and one by OTLP, where OpenTelemetry's own variables ask for that."""
    log.info(event, **fields)
    context = trace.set_span_in_context(span) if span is not None else None
    get_logger("tandem.requests").emit(
        LogRecord(context=context, severity_number=SeverityNumber.INFO, body=event, attributes=fields, event_name=event)
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _quantile(gaps: list[int], share: float) -> float | None:
    """The bound of vLLM's histogram that so many of the gaps do not pass; none of those beyond its last."""
    if not (total := sum(gaps)):
        return None
    at = bisect_left(list(accumulate(gaps)), share * total)
    return ITL[at] if at < len(ITL) else None
