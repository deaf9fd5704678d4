"""Going on elsewhere: what a choice does when a worker is lost under it, before its first token or behind any other.

a worker is lost   -> the next attempt leaves its incarnation out; tokens already sent are the end of its prompt
nobody is left     -> everyone may be tried again, every RETRY_S, while a worker is restarted
no link is proven, or the registry knows nobody though a decode worker answers here
                   -> so it may, though nobody was lost, for up to SOON_S: links are opened anew, leases renewed
the limit, or wait_s without a worker, is reached -> the first loss is the choice's error
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog
from opentelemetry.trace import Span, Tracer

from services.gateway.errors import Unavailable, WorkerLost
from services.gateway.generation import tracing

log = structlog.get_logger(__name__)
RETRY_S = 0.1
SOON_S = 1.5
NO_LINK, NO_WORKERS = "no_link", "no_workers"


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """`most`: migrations of one choice. `wait_s`: how long a choice waits for a worker to resume on."""

    most: int
    wait_s: float


class Migration:
    """The migrations of one choice. Must be closed."""

    def __init__(
        self, limits: MigrationLimits, name: str, spans: Tracer, parent: Span, count: Callable[[], None]
    ) -> None:
        self.number = 0
        self.exclude: set[str] = set()
        self._gone: set[str] = set()  # incarnations lost since the last token
        self.first_loss: WorkerLost | None = None
        self._limits, self._name = limits, name
        self._spans, self._parent, self._count = spans, parent, count
        self._wait_until: float | None = None
        self._soon_by: float | None = None
        self._span: Span | None = None

    def lost(self, error: WorkerLost, incarnations: Collection[str], lost_span: Span | None, num_written: int) -> None:
        """Note an attempt that failed because workers were lost.

        Raises:
            WorkerLost: the first loss, if no other attempt is allowed.
        """
        self.first_loss = self.first_loss or error
        if incarnations and self._gone.issuperset(incarnations):  # tried again too early; `pause` bounds these attempts
            self.exclude |= set(incarnations)
            return
        if self.number == self._limits.most:
            raise self.first_loss from None
        self.number += 1
        self.exclude |= set(incarnations)
        self._gone |= set(incarnations)
        if self._wait_until is None:
            self._wait_until = asyncio.get_running_loop().time() + self._limits.wait_s
        self._count()
        log.warning("going on elsewhere", request_id=self._name, written=num_written, reason=error.message)
        self._end_span()
        self._span = tracing.migration(self._spans, self._parent, lost_span, error, num_written)

    async def pause(self, error: Unavailable, decode_answers: bool) -> None:
        """Wait a moment where no worker or no link is left, then allow all workers to be tried.

        Raises:
            Unavailable: there was no loss, or the wait exceeds its bound.
        """
        now = asyncio.get_running_loop().time()
        soon = error.code == NO_LINK or (error.code == NO_WORKERS and decode_answers)
        if self.first_loss is None and soon:
            self._soon_by = self._soon_by or now + SOON_S
            if now >= self._soon_by:
                raise error
        elif self.first_loss is None or self._wait_until is None or error.code not in (NO_WORKERS, NO_LINK):
            raise error
        elif now >= self._wait_until:
            raise self.first_loss from None
        self.exclude.clear()
        await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """End the span of a migration under way."""
        self._wait_until = None
        self._gone.clear()
        self._end_span()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None
