"""The life of one choice: its turn, then attempts until one answers.

    queue     until it is let in: order and fairness are decided here
    attempt 1 ── tokens … ── worker lost ──> attempt 2 goes on behind them, elsewhere ── tokens … ── the end
                                 ├── no attempt left ──> the first loss is the error        (migration.py)
                                 └── two that crashed name it ──> poison                    (suspicion.py)

Each attempt has a request id of its own, so that late messages of a failed one mean nothing to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from math import inf

from opentelemetry.context import Context

from services.gateway.admission import Admission, PriorityClass, Work
from services.gateway.errors import Unavailable, WorkerLost
from services.gateway.generation import tracing
from services.gateway.generation.attempt import Attempt, ClusterAccess, Outcome
from services.gateway.generation.migration import Migration, MigrationLimits
from services.gateway.generation.shared_prompt import SharedPrompt
from services.gateway.generation.suspicion import Suspicion
from services.gateway.metrics import Metrics
from services.gateway.workers import Tokens
from tandem.v1 import worker_pb2


class Pipeline:
    """Tokens of sequences, from workers."""

    def __init__(
        self,
        cluster: ClusterAccess,
        admission: Admission,
        metrics: Metrics,
        nonce: Callable[[], str],
        limits: MigrationLimits,
    ) -> None:
        self._cluster = cluster
        self._admission = admission
        self._metrics = metrics
        self._nonce = nonce
        self._limits = limits

    async def begin(self, num_tokens: int) -> None:
        """As SequenceTurns.begin."""
        await self._cluster.turns.begin(num_tokens)

    def check_turn(
        self, priority: int, tenant: str, deadline: float, max_tokens: int | None, ttft_s: float | None
    ) -> None:
        """Before a prompt is read: would its answer of so many tokens, however short the prompt, come too late?

        Raises:
            Overloaded
        """
        self._admission.check(Work(PriorityClass.of(priority), tenant, deadline, 0, max(max_tokens or 1, 1), ttft_s))

    async def tokens(
        self, sequence: worker_pb2.SequenceSpec, name: str, deadline: float, parent: Context, outcome: Outcome,
        prompt: SharedPrompt | None = None, ttft_s: float | None = None,
    ) -> AsyncGenerator[Tokens, None]:  # fmt: skip
        """New tokens as they come, once it is its turn, but those that the outcome's taker had. Closing the generator
        frees everything at once.

        Args:
            prompt: read for another choice.
            ttft_s: how late the first one may come.

        Raises:
            GatewayError
        """
        work = Work(
            PriorityClass.of(sequence.priority), sequence.tenant, deadline,
            len(sequence.token_ids), sequence.sampling.max_tokens, ttft_s,
        )  # fmt: skip
        migration = Migration(self._limits, name, self._cluster.spans, parent, self._metrics.migrations.inc)
        sequence.choice_id = self._nonce() + self._nonce()
        suspicion = Suspicion(sequence.choice_id, self._cluster.deaths, self._limits.wait_s)
        crashed: set[str] = set()
        written: list[int] = []
        first_by = inf if ttft_s is None else asyncio.get_running_loop().time() + ttft_s
        going = False

        def wrote(new: Tokens) -> None:
            nonlocal going
            if not going:
                migration.close()
                going = True
            written.extend(new.ids)
            self._admission.wrote(work, len(new.ids))

        try:
            await self._wait_turn(work, parent, outcome)
            holder = await prompt.holder(deadline) if prompt else ""
            while True:
                if crashed:
                    await suspicion.lost(crashed, len(written), deadline)
                    crashed, sequence.alone_until = set(), suspicion.alone_until
                _continue_behind(sequence, written)
                going = False
                sequence.request_id = f"{name}-{self._nonce()}"
                outcome.migrated = migration.number
                attempt = Attempt(
                    self._cluster, sequence, deadline, parent, outcome, wrote, holder, inf if written else first_by
                )
                try:
                    async with aclosing(attempt.tokens(migration.exclude)) as tokens:
                        async for new in tokens:
                            yield new
                    return
                except WorkerLost as error:
                    outcome.lost, crashed = error.message, attempt.crashed(error)
                    migration.lost(error, attempt.lost_incarnations(error), attempt.span, len(written))
                except Unavailable as error:
                    await migration.pause(error)
                finally:
                    self._cluster.in_background(attempt.close())
        finally:
            migration.close()
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


def _continue_behind(sequence: worker_pb2.SequenceSpec, written: list[int]) -> None:
    """Make the tokens written so far the end of the prompt."""
    sequence.token_ids.extend(written[sequence.num_prior_tokens :])
    sequence.num_prior_tokens = len(written)
