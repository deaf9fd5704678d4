"""One try of one embedding on one prefill worker; nothing is decoded, and no KV moves.

    choose    the prefill worker that answers and has the least load, by this gateway and by the registry
    embed     its reply carries the vector
    end       it aborts what it has not ended

A lost worker is excluded from the next attempt, as with answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection

from opentelemetry.trace import SpanKind

from services.gateway.errors import InvalidRequest, TimedOut, Unavailable, WorkerLost
from services.gateway.generation import tracing
from services.gateway.generation.attempt import Attempt
from services.gateway.generation.recovery.migration import NO_WORKERS
from services.gateway.workers import Tokens, WorkerConnection
from tandem.registry import LiveWorker, Role
from tandem.v1 import llm_pb2, worker_pb2


class EmbeddingAttempt(Attempt):
    def lost_incarnations(self, error: WorkerLost) -> set[str]:
        return {connection.info.incarnation for connection in self._connections}

    def crashed(self, error: WorkerLost) -> set[str]:
        return self.lost_incarnations(error) if error.ended else set()

    async def tokens(self, exclude: Collection[str]) -> AsyncGenerator[Tokens, None]:
        """Raises GatewayError."""
        prefill, choice = self._use(self._least_busy(exclude).info), self._choice
        choice.path = llm_pb2.Path(prefill_worker=prefill.info.worker_id, reason="embedding", migrated=choice.migrated)
        choice.revision = prefill.info.revision
        with tracing.child(self._cluster.spans, "prefill", self._parent, SpanKind.CLIENT) as span:
            self.span = span
            span.set_attribute("tandem.worker", prefill.info.worker_id)
            await prefill.stream.wait_open(self._deadline)
            output = await self._embedded(prefill, worker_pb2.Prefill(sequence=self._asked(span)))
        choice.num_cached_tokens = output.num_cached_tokens
        choice.finish_reason = llm_pb2.FINISH_REASON_LENGTH
        yield Tokens([], [], embedding=output.embedding)

    async def _embedded(self, prefill: WorkerConnection, asked: worker_pb2.Prefill) -> worker_pb2.SequenceOutput:
        mailbox = self._mailbox = prefill.stream.attach(asked.sequence.request_id)
        late = TimedOut("the request's deadline passed")
        self._timer = self._cluster.deadlines.add(self._deadline, mailbox.fail, late)
        reply = prefill.stream.prefill(asked)
        try:
            response: worker_pb2.Prefilled = await mailbox.answered(reply)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, "dimensions" if "dimensions:" in error.message else None) from None
        finally:
            if not reply.done():
                self._abort(prefill, mailbox)
        return response.output

    def _least_busy(self, exclude: Collection[str]) -> LiveWorker:
        pool = self._cluster.pool
        out = pool.foreign | set(exclude)
        found = [
            worker for worker in pool.workers
            if worker.info.role is Role.PREFILL and worker.info.incarnation not in out and not worker.load.draining
        ]  # fmt: skip
        if not found:
            raise Unavailable("no prefill worker is there, and embeddings are computed by no others", code=NO_WORKERS)
        doubtful = pool.lost() | pool.unmet() | pool.doubtful()
        return min(found, key=lambda worker: (worker.info.incarnation in doubtful, *self._burden(worker)))

    def _burden(self, worker: LiveWorker) -> tuple[bool, bool, int, int]:
        pool, info = self._cluster.pool, worker.info
        running = pool.connection(info).running if pool.connected(info) else 0
        return not pool.connected(info), worker.load.stuck, running, worker.load.queued_tokens
