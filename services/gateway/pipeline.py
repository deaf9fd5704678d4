"""The life of one choice: attempts until one answers.

    attempt 1 ── worker lost, nothing sent yet ──> attempt 2, without that worker ── any failure ──> the first error
             └── tokens …

Each attempt has a request id of its own, so that late messages of a failed one mean nothing to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import structlog
from opentelemetry.context import Context

from services.gateway.attempt import Attempt, Cluster, Outcome
from services.gateway.errors import GatewayError, WorkerLost
from services.gateway.workers import Tokens
from tandem.v1 import worker_pb2

log = structlog.get_logger(__name__)


class Afterwards:
    """Runs what must be finished after a request has ended. `drain` waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __call__(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("freeing a request failed", exc_info=task.exception())


class Pipeline:
    """Tokens of sequences, from workers."""

    def __init__(self, cluster: Cluster, nonce: Callable[[], str]) -> None:
        self._cluster = cluster
        self._nonce = nonce

    async def tokens(
        self, sequence: worker_pb2.SequenceSpec, name: str, deadline: float, parent: Context, outcome: Outcome
    ) -> AsyncGenerator[Tokens, None]:
        """New tokens as they come. Closing the generator frees everything at once.

        Raises:
            GatewayError
        """
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
                log.warning("trying again elsewhere", request_id=name, reason=error.message)
            except GatewayError:
                if lost is None:
                    raise
                raise lost from None
            finally:
                self._cluster.later(attempt.close())
