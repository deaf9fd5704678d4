"""The gateway's side of every worker: one channel per incarnation, one token stream per decode worker.

    view names an incarnation  -> Link made (channel; decode: stream task)
    view or registry names another one -> Link closed, its requests failed at once; the old one never comes back
    view names none, and no request is left on it -> Link closed

A worker that the view has lost (its lease ran out, or Redis is gone) keeps its link while the link works: only the
link itself or a newer incarnation says that a worker is dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog
from grpc import aio

from services.gateway.errors import GatewayError, WorkerLost
from services.gateway.workers.link import Link
from tandem.clock import Clock
from tandem.registry import ClusterView, Worker, WorkerInfo

log = structlog.get_logger(__name__)
FOLLOW_S = 1.0
MAX_REPLACED = 1024


class WorkerPool:
    """Links to the workers of one model. `run` follows the view; `close` ends all links."""

    def __init__(
        self,
        view: ClusterView,
        model: str,
        gateway_id: str,
        clock: Clock,
        connect: Callable[[str], aio.Channel],
    ) -> None:
        self._view = view
        self._model = model
        self._gateway_id = gateway_id
        self._clock = clock
        self._connect = connect
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # The view may still name an incarnation that the registry's last answer has replaced.
        self._replaced: deque[str] = deque(maxlen=MAX_REPLACED)

    @property
    def workers(self) -> list[Worker]:
        """Workers of the model, as last seen."""
        return [worker for worker in self._view.workers if worker.info.model == self._model]

    def link(self, info: WorkerInfo) -> Link:
        """The link to this incarnation; made if there is none.

        Raises:
            WorkerLost: a newer incarnation has taken its place.
        """
        known = self._links.get(info.worker_id)
        if known is not None and known.info.incarnation == info.incarnation:
            return known
        if info.incarnation in self._replaced:
            raise WorkerLost(info.worker_id, f"incarnation {info.incarnation} was replaced")
        if known is not None:
            self._replaced.append(known.info.incarnation)
            self._retire(known, f"it was restarted: incarnation {info.incarnation} took its place")
        made = Link(info, self._connect(info.grpc_address), self._gateway_id, self._clock)
        self._links[info.worker_id] = made
        return made

    def connected(self, info: WorkerInfo) -> bool:
        """Whether this incarnation answers."""
        known = self._links.get(info.worker_id)
        return known is not None and known.info.incarnation == info.incarnation and known.connected

    def lost(self) -> set[str]:
        """Incarnations that have stopped answering: dead already, whatever their lease in the registry says."""
        return {link.info.incarnation for link in self._links.values() if link.lost}

    async def run(self) -> None:
        """Follow the view until cancelled."""
        while True:
            self.follow(self.workers)
            await self._view.wait_changed(FOLLOW_S)

    def follow(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker.info.incarnation not in self._replaced:
                self.link(worker.info)
        seen = {worker.info.worker_id for worker in workers}
        for worker_id, link in list(self._links.items()):
            if link.broken:
                log.error("link died", worker=worker_id, error=link.broken)
                self._retire(link, "internal error in its link")
            elif worker_id not in seen and not link.running:
                self._retire(link, "it left the cluster")

    def stop(self, error: GatewayError) -> None:
        """No more sequences; those that run end with this error. Aborts still get through."""
        for link in self._links.values():
            link.stream.stop(error)

    async def close(self) -> None:
        for link in list(self._links.values()):
            self._retire(link, "the gateway is stopping")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _retire(self, link: Link, reason: str) -> None:
        link.stream.close(reason)
        del self._links[link.info.worker_id]
        task = asyncio.create_task(link.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
