"""The life of one choice: its turn, then attempts until one answers.

    queue     until it is admitted: order and fairness are decided here
    attempt 1 ── tokens … ── worker lost ──> attempt 2 resumes after them on other workers ── tokens … ── the end
                                 ├── no attempt left ──> the first loss is the error        (migration.py)
                                 └── two crashes name it ──> poison                         (suspicion.py)

Each attempt has its own request id, so that late messages of a failed one cannot reach the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from math import inf

from opentelemetry.trace import Span

from services.gateway.admission import Admission, PriorityClass, Targets, Work
from services.gateway.errors import Overloaded, Poison, Unavailable, WorkerLost
from services.gateway.generation import tracing
from services.gateway.generation.attempt import Attempt, ClusterAccess
from services.gateway.generation.choice import Choice
from services.gateway.generation.embedding import EmbeddingAttempt
from services.gateway.generation.recovery.migration import Migration, MigrationLimits
from services.gateway.generation.recovery.suspicion import Suspicion
from services.gateway.generation.shared_prompt import SharedPrompt
from services.gateway.telemetry import Metrics, RequestEnd, RequestRecords
from services.gateway.workers import Tokens
from tandem.registry import Role
from tandem.v1 import worker_pb2


class Pipeline:
    """Runs the choices of all answers of a model."""

    def __init__(
        self,
        cluster: ClusterAccess,
        admission: Admission,
        metrics: Metrics,
        nonce: Callable[[], str],
        limits: MigrationLimits,
        records: RequestRecords,
    ) -> None:
        self.cluster, self.metrics, self.records = cluster, metrics, records
        self._admission = admission
        self._nonce = nonce
        self._limits = limits

    def check_turn(self, priority: int, tenant: str, deadline: float, max_tokens: int | None, targets: Targets) -> None:
        """Refuse, before tokenizing its prompt, a request whose answer would come too late even after a short prompt.

        Raises Overloaded.
        """
        kind = PriorityClass.of(priority)
        try:
            least = Work(kind, tenant, deadline, 0, max(max_tokens or 1, 1), targets.ttft_s, targets.end_by)
            self._admission.check(least)
        except Overloaded as error:
            self.metrics.tenants.ended(RequestEnd(tenant, kind, error.status))
            raise

    async def begin(self, choice: Choice, max_model_len: int, seed: int, parent: Span) -> None:
        """Begin a choice, in its turn, as packing long prompts takes long."""
        request, loop = choice.request, asyncio.get_running_loop()
        await self.cluster.turns.begin(request.num_packed(choice.index))
        choice.sequence = sequence = request.sequence(choice.index, max_model_len, seed)
        sequence.choice_id = self._nonce() + self._nonce()
        choice.parent = parent
        choice.meter = self.metrics.choice(loop.time, tracing.kept_trace(parent))
        targets, router = request.targets, self.cluster.router
        choice.first_by = inf if targets.aim_s is None else loop.time() + targets.aim_s
        choice.work = Work(
            PriorityClass.of(request.priority), request.tenant, request.deadline,
            len(sequence.token_ids), sequence.sampling.max_tokens, targets.ttft_s, targets.end_by,
            partial(router.cached_tokens, sequence.token_ids, sequence.adapter.revision, sequence.cache_salt),
        )  # fmt: skip

    async def tokens(self, choice: Choice, prompt: SharedPrompt | None = None) -> AsyncGenerator[Tokens, None]:
        """Yields new tokens that the choice does not take itself. Closing the generator frees everything immediately.

        Args:
            choice: begun already.
            prompt: shared with another choice, which has it prefilled.

        Raises:
            GatewayError
        """
        cluster = self.cluster
        migration = Migration(self._limits, choice.name, cluster.spans, choice.parent, self.metrics.migrations.inc)
        suspicion = Suspicion(choice.sequence.choice_id, cluster.deaths, self._limits.wait_s)
        crashed: set[str] = set()
        cluster.convictions.check(choice.sequence)
        try:
            await self._wait_turn(choice)
            choice.holder = await prompt.holder(choice.request.deadline) if prompt else ""
            while True:
                attempt = await self._next_attempt(choice, suspicion, crashed, migration.number)
                try:
                    async with aclosing(attempt.tokens(migration.exclude)) as tokens:
                        async for new in tokens:
                            migration.close()
                            self._admission.wrote(choice.work, len(new.ids))
                            yield new
                    return
                except WorkerLost as error:
                    choice.lost, crashed = error.message, attempt.crashed(error)
                    migration.lost(error, attempt.lost_incarnations(error), attempt.span, len(choice.written))
                except Unavailable as error:
                    if choice.request.elsewhere():
                        raise
                    await migration.pause(error, cluster.pool.answers(Role.DECODE))
                finally:
                    attempt.end()
        finally:
            migration.close()
            self._admission.leave(choice.work)

    async def _next_attempt(self, choice: Choice, suspicion: Suspicion, crashed: set[str], number: int) -> Attempt:
        """Returns the next attempt, which continues after the written tokens.

        `crashed`: workers that may have died of the last attempt; emptied.
        """
        sequence = choice.sequence
        if crashed:
            try:
                await suspicion.lost(crashed, len(choice.written), choice.request.deadline)
            except Poison as verdict:
                self.cluster.convictions.add(sequence, verdict)
                raise
            crashed.clear()
            sequence.alone_until, sequence.begins_apart = suspicion.alone_until, suspicion.begins_apart
        _continue_behind(sequence, choice.written)
        sequence.request_id = f"{choice.name}-{self._nonce()}"
        choice.migrated = number
        return (EmbeddingAttempt if sequence.HasField("embedding") else Attempt)(self.cluster, choice)

    async def _wait_turn(self, choice: Choice) -> None:
        now, work = asyncio.get_running_loop().time, choice.work
        arrived = now()
        with tracing.child(self.cluster.spans, "queue", choice.parent) as span:
            span.set_attributes({"tandem.queue.class": work.priority_class.label, "tandem.queue.tenant": work.tenant})
            try:
                await self._admission.enter(work)
            finally:
                choice.queued_s = now() - arrived
                span.set_attribute("tandem.queue.wait_s", choice.queued_s)
                self.metrics.queued(work.priority_class, choice.queued_s)


def _continue_behind(sequence: worker_pb2.SequenceSpec, written: list[int]) -> None:
    """Make the tokens written so far the end of the prompt."""
    sequence.token_ids.extend(written[sequence.num_prior_tokens :])
    sequence.num_prior_tokens = len(written)
