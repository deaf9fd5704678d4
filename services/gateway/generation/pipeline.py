"""The life of one choice: its turn, then attempts until one answers.

    queue     until it is let in: order and fairness are decided here
    attempt 1 ── worker lost, nothing sent yet ──> attempt 2, without that worker ── any failure ──> the first error
             └── tokens …

Each attempt has a request id of its own, so that late messages of a failed one mean nothing to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog
from opentelemetry.context import Context

from services.gateway.admission import Admission, Work
from services.gateway.errors import GatewayError, WorkerLost
from services.gateway.generation import tracing
from services.gateway.generation.attempt import Attempt, ClusterAccess, Outcome
from services.gateway.metrics import Metrics
from services.gateway.priority import PriorityClass
from services.gateway.workers import Tokens
from tandem.v1 import worker_pb2

log = structlog.get_logger(__name__)


class Pipeline:
    """Tokens of sequences, from workers."""

    def __init__(
        self, cluster: ClusterAccess, admission: Admission, metrics: Metrics, nonce: Callable[[], str]
    ) -> None:
        self._cluster = cluster
        self._admission = admission
        self._metrics = metrics
        self._nonce = nonce

    async def tokens(
        self, sequence: worker_pb2.SequenceSpec, name: str, deadline: float, parent: Context, outcome: Outcome
    ) -> AsyncGenerator[Tokens, None]:
        """New tokens as they come, once it is its turn. Closing the generator frees everything at once.

        Raises:
            GatewayError
        """
        work = Work(
            PriorityClass.of(sequence.priority), sequence.tenant, deadline,
            len(sequence.token_ids), sequence.sampling.max_tokens,
        )  # fmt: skip
        try:
            await self._wait_turn(work, parent, outcome)
            async with aclosing(self._attempts(sequence, name, deadline, parent, outcome)) as deltas:
                async for delta in deltas:
                    self._admission.wrote(work, len(delta.ids))
                    yield delta
        finally:
            self._admission.leave(work)

    async def _wait_turn(self, work: Work, parent: Context, outcome: Outcome) -> None:
        now = asyncio.get_running_loop().time
        arrived = now()
        with tracing.child(self._cluster.spans, "queue", parent) as span:
            span.set_attributes({"tandem.queue.class": work.priority_class.label, "tandem.queue.tenant": work.tenant})
            try:
                await self._admission.enter(work)
            finally:
                outcome.queued_s = now() - arrived
                span.set_attribute("tandem.queue.wait_s", outcome.queued_s)
                self._metrics.queued(work.priority_class, outcome.queued_s)

    async def _attempts(
        self, sequence: worker_pb2.SequenceSpec, name: str, deadline: float, parent: Context, outcome: Outcome
    ) -> AsyncGenerator[Tokens, None]:
        lost, exclude = None, set[str]()
        for _ in range(2):
            sequence.request_id = f"{name}-{self._nonce()}"
            attempt = Attempt(self._cluster, sequence, deadline, parent, outcome)
            sent = False
            try:
                async with aclosing(attempt.tokens(exclude)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        sent = True
                        yield delta
                return
            except WorkerLost as error:
                if sent or lost:
                    raise lost or error from None
                lost, exclude = error, {error.worker_id} | attempt.lost_decode
                outcome.lost = error.message
                log.warning("trying again elsewhere", request_id=name, reason=error.message)
            except GatewayError:
                if lost is None:
                    raise
                raise lost from None
            finally:
                self._cluster.in_background(attempt.close())
