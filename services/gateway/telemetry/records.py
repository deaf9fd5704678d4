"""One record for each request that ended, without prompt, answer or key: a log line, `request` or `request refused`,
and for the console a memory of the latest.

a request ends ──> add ──> write, with others: a line each, by OTLP too where OpenTelemetry's own variables ask for it

What ends within WRITE_S is written together: one by one, each time between other work, a record costs twice as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber, get_logger
from opentelemetry.trace import Span

from services.gateway.errors import GatewayError

log = structlog.get_logger("tandem.requests")
MAX_RECORDS = 512
# Records are written after this time, or this many together: half a millisecond's work.
WRITE_S, AT_ONCE = 0.05, 32
Fields = dict[str, Any]
Together = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class Ending:
    """How a request ended.

    `outcome`: "ok", "client_left" or the error's type; `first_s`: from its arrival to its first token, if any;
    `whole_s` from its arrival to its end; `trace_id` 0 where it has no trace.
    """

    status: int
    outcome: str
    first_s: float | None
    whole_s: float
    trace_id: int


class RequestRecords:
    """The records of requests that ended last. Call `write` before the process ends, so that none is lost."""

    def __init__(self, most: int = MAX_RECORDS, together: Together = nullcontext) -> None:
        """`together`: a context whose log lines are written together at its end."""
        self._together = together
        self._kept: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=most)
        self._ended: list[tuple[float, str, Callable[[], Fields], Span | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._otel = get_logger("tandem.requests")

    def add(self, event: str, fields: Callable[[], Fields], span: Span | None = None) -> None:
        """Add a request that ends now.

        Args:
            fields: returns the fields when the record is written; may also count the request.
        """
        loop = asyncio.get_running_loop()
        self._ended.append((loop.time(), event, fields, span))
        if self._timer is None:
            self._timer = loop.call_later(WRITE_S, self.write)
        if len(self._ended) >= AT_ONCE:
            self.write()

    def write(self) -> None:
        """Write the records of all requests that have ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        with self._together():
            line = log.bind()  # bound once for all of them
            for at, event, fields, span in ended:
                try:
                    told = fields()
                    self._kept.append((at, told))
                    line.info(event, **told)
                    if self._otel.enabled(severity_number=SeverityNumber.INFO, event_name=event):
                        self._emit(event, told, span)
                except Exception as error:  # a bug, which must not fail the request that ends now
                    log.error("a request could not be recorded", exc_info=error)

    def _emit(self, event: str, told: Fields, span: Span | None) -> None:
        context = trace.set_span_in_context(span) if span is not None else None
        number = SeverityNumber.INFO
        self._otel.emit(
            LogRecord(context=context, severity_number=number, body=event, attributes=told, event_name=event)
        )

    def latest(self, most: int, tenant: str | None) -> list[Fields]:
        """Returns the latest records, newest first, each with `ago_s`; only `tenant`'s if given."""
        self.write()
        now = asyncio.get_running_loop().time()
        found = (one for one in reversed(self._kept) if tenant is None or one[1].get("tenant") == tenant)
        return [{**fields, "ago_s": round(now - at, 3)} for at, fields in islice(found, most)]


def record_refused(records: RequestRecords, request_id: str, error: GatewayError, after_s: float) -> None:
    """Record a request that failed before it reached the cluster, without the error's text, which may quote it."""
    told = {"request_id": request_id, "status": error.status, "outcome": error.type, "whole_s": rounded(after_s)}
    told |= {"code": error.code} if error.code else {}
    records.add("request refused", lambda: told)


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
