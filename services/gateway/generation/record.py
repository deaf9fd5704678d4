"""The fields of an answer's record: the request, its path, and its speed."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from services.gateway.admission import PriorityClass
from services.gateway.generation.choice import REASONS
from services.gateway.generation.request import Generation
from services.gateway.telemetry import PATHS, Ending, Fields, rounded
from tandem.catalogue.metrics import ITL
from tandem.v1 import llm_pb2

if TYPE_CHECKING:
    from services.gateway.generation.answer import Answer


def fields_of(answer: Answer, end: Ending, usage: llm_pb2.Usage) -> Fields:
    """Returns the fields of an answer's record."""
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
        "queue_s": rounded(max(choice.queued_s for choice in answer.choices)),
        "ttft_s": rounded(end.first_s),
        "itl_p50_s": _quantile(gaps, 0.5),
        "itl_p99_s": _quantile(gaps, 0.99),
        "tokens_per_s": round(usage.completion_tokens / writing_s, 1) if writing_s else None,
        "whole_s": rounded(end.whole_s),
        "batch_size": max(mailbox.batch_size for mailbox in mailboxes) if mailboxes else 0,
        "kv_usage": round(max(mailbox.kv_usage for mailbox in mailboxes), 4) if mailboxes else 0.0,
        "migrations": sum(choice.migrated for choice in answer.choices),
        "cost": _cost(request, usage),
    }
    return {name: value for name, value in fields.items() if value not in (None, "", 0.0)}


def is_slow(answer: Answer, first_s: float | None) -> bool:
    """True if the answer missed a target, by its TTFT or by the 99th percentile of its ITL."""
    targets, gap_s = answer.request.targets, _quantile(_gaps(answer), 0.99)
    is_late = first_s is not None and targets.ttft_s is not None and first_s > targets.ttft_s
    return is_late or (gap_s is not None and targets.itl_s is not None and gap_s > targets.itl_s)


def _gaps(answer: Answer) -> list[int]:
    """Returns the histogram of the times between tokens, summed over choices."""
    if len(answer.choices) == 1:
        return answer.choices[0].gaps
    return [sum(counts) for counts in zip(*(choice.gaps for choice in answer.choices), strict=True)]


def _cost(request: Generation, usage: llm_pb2.Usage) -> float:
    """Returns the cost by the tier's prices; 0 if no token was written."""
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


def _quantile(gaps: list[int], share: float) -> float | None:
    """Returns the bucket bound, in seconds, that this share of gaps does not exceed; None beyond the last bucket."""
    if not (total := sum(gaps)):
        return None
    at = bisect_left(list(accumulate(gaps)), share * total)
    return ITL[at] if at < len(ITL) else None
