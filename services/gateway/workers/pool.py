"""The gateway's connections to workers: one channel and one stream per incarnation.

    view names an incarnation  -> connection made (channel, stream task)
    view or registry names another one -> connection closed, its requests failed at once; the old one never returns
    view names none, and no request is left on it -> connection closed

A worker that the view has lost (its lease ran out, or Redis is gone) keeps its connection while that works: only the
connection itself or a newer incarnation says that a worker is dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
from grpc import aio

from services.gateway.errors import GatewayError, WorkerLost
from services.gateway.workers.connection import WorkerConnection
from services.gateway.workers.stream import Judge
from tandem.registry import ClusterView, LiveWorker, ModelKey, Role, WorkerInfo

log = structlog.get_logger(__name__)
FOLLOW_S = 1.0
MAX_REPLACED = 1024
# Seconds without an answer after which a worker is called on a new channel.
RENEW_S = 2.0
# Far longer than a worker takes to open its stream.
MEETING_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Judging:
    """How silent workers are judged. `decodes_prefill`: decode workers prefill if no prefill worker is left."""

    starvation: Callable[[], float]  # this gateway's
    dead_here: Callable[[str], str]
    decodes_prefill: bool


TRUSTING = Judging(lambda: 0.0, lambda process: "", decodes_prefill=True)


class WorkerPool:
    """The connections to the workers of one model. `run` follows the view; `close` ends all connections."""

    def __init__(
        self,
        view: ClusterView,
        model: ModelKey,
        connect: Callable[[str], aio.Channel],
        judging: Judging = TRUSTING,
    ) -> None:
        self._view = view
        self._model = model
        self._connect = connect
        self._judging = judging
        self._sorted: tuple[Sequence[LiveWorker] | None, list[LiveWorker], frozenset[str]] = (None, [], frozenset())
        self._judge = Judge(judging.starvation, self.is_sole, judging.dead_here)
        self._connections: dict[str, WorkerConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False
        # The view may still name an incarnation that a later answer of the registry has replaced.
        self._replaced: deque[str] = deque(maxlen=MAX_REPLACED)

    @property
    def workers(self) -> list[LiveWorker]:
        """The model's workers as last seen."""
        return self._sort()[0]

    @property
    def foreign(self) -> frozenset[str]:
        """Incarnations of workers with another fingerprint of the same model."""
        return self._sort()[1]

    @property
    def connections(self) -> list[WorkerConnection]:
        return list(self._connections.values())

    def connection(self, info: WorkerInfo) -> WorkerConnection:
        """Returns the connection to this incarnation, made if there is none.

        Raises:
            WorkerLost: a newer incarnation has taken its place, its model takes other tokens for a text, which was not
                seen yet when it was chosen, or this gateway's certificate cannot be read.
        """
        if info.key != self._model:
            raise WorkerLost(info.worker_id, "its model takes other tokens for a text")
        known = self._connections.get(info.worker_id)
        if known is not None and known.info.incarnation == info.incarnation:
            return known
        if info.incarnation in self._replaced:
            raise WorkerLost(info.worker_id, f"incarnation {info.incarnation} was replaced")
        if known is not None:
            self._replaced.append(known.info.incarnation)
            self._retire(known, f"it was restarted: incarnation {info.incarnation} took its place")
        return self._make(info)

    def connected(self, info: WorkerInfo) -> bool:
        """True if this incarnation answers."""
        known = self._connections.get(info.worker_id)
        return known is not None and known.info.incarnation == info.incarnation and known.connected

    def has_met(self, info: WorkerInfo) -> bool:
        """True if this incarnation has ever answered."""
        known = self._connections.get(info.worker_id)
        return known is not None and known.info.incarnation == info.incarnation and (known.connected or known.met)

    def answers(self, role: Role) -> bool:
        """True if any worker of the role answers now, whatever the registry reports."""
        return any(connection.info.role is role for connection in self.all_connected())

    def all_connected(self) -> list[WorkerConnection]:
        """Returns the connections that answer now."""
        return [connection for connection in self._connections.values() if connection.connected]

    def is_sole(self, info: WorkerInfo) -> bool:
        """True if no other answering worker could do this worker's work."""
        out = {worker.info.incarnation for worker in self.workers if worker.load.draining} | {info.incarnation}
        others = (one for one in self._connections.values() if one.info.incarnation not in out)
        roles = {info.role, Role.DECODE} if self._judging.decodes_prefill else {info.role}
        return not any(one.info.role in roles and one.stream.answers for one in others)

    def lost(self) -> set[str]:
        """Incarnations that stopped answering: dead already, although their lease may still hold."""
        return {connection.info.incarnation for connection in self._connections.values() if connection.lost}

    def unmet(self) -> set[str]:
        """Incarnations that never answered although they had time to."""
        found = (one for one in self._connections.values() if one.absent_s > MEETING_S and not one.met)
        return {one.info.incarnation for one in found}

    def doubtful(self) -> set[str]:
        """Incarnations silent for so long that an answering one is the better choice."""
        return {one.info.incarnation for one in self._connections.values() if one.stream.doubtful}

    async def run(self) -> None:
        """Follow the view until cancelled."""
        while True:
            self.follow(self.workers)
            await self._view.wait_changed(FOLLOW_S)

    def follow(self, workers: Sequence[LiveWorker]) -> None:
        for worker in workers:
            if worker.info.incarnation not in self._replaced:
                self._try(self.connection, worker.info)
        seen = {worker.info.worker_id for worker in workers}
        for worker_id, connection in list(self._connections.items()):
            if connection.broken:
                log.error("connection died", worker=worker_id, error=connection.broken)
                self._retire(connection, "internal error in its connection")
            elif worker_id not in seen and not connection.running:
                self._retire(connection, "it left the cluster")
            elif connection.absent_s > RENEW_S and not connection.running and not self._stopped:
                self._try(self._renew, connection)

    def stop(self, error: Callable[[], GatewayError]) -> None:
        """Accept no more sequences and end running ones by an error each. Aborts are still sent."""
        self._stopped = True
        for connection in self._connections.values():
            connection.stream.stop(error)

    async def close(self) -> None:
        for connection in list(self._connections.values()):
            self._retire(connection, "the gateway is stopping")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _sort(self) -> tuple[list[LiveWorker], frozenset[str]]:
        """The model's workers and the foreign incarnations, sorted once for each refresh of the view."""
        if self._sorted[0] is not self._view.workers:
            named = [worker for worker in self._view.workers if worker.info.model == self._model.name]
            workers = [worker for worker in named if worker.info.key == self._model]
            foreign = frozenset(one.info.incarnation for one in named if one.info.key != self._model)
            self._sorted = self._view.workers, workers, foreign
        return self._sorted[1:]

    def _make(self, info: WorkerInfo, met: bool = False) -> WorkerConnection:
        try:
            made = self._connections[info.worker_id] = WorkerConnection(info, self._connect, self._judge, met)
        except OSError as error:
            raise WorkerLost(info.worker_id, f"this gateway's certificate cannot be read: {error}") from None
        return made

    def _renew(self, connection: WorkerConnection) -> None:
        """Replace a silent worker's channel: a channel keeps the certificate it was made with."""
        self._retire(connection, "it does not answer")
        self._make(connection.info, connection.met)

    def _try(self, step: Callable[[T], object], of: T) -> None:
        try:
            step(of)
        except WorkerLost as error:
            log.error("no connection", error=error.message)

    def _retire(self, connection: WorkerConnection, reason: str) -> None:
        connection.stream.close(reason)
        del self._connections[connection.info.worker_id]
        task = asyncio.create_task(connection.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
