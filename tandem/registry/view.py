"""A gateway's view of the cluster, updated in the background and kept while Redis is gone.

refresh on start ──> on every change (pub/sub) and every `poll` seconds ──> until cancelled

Redis gone            the last view stays, `age` grows, `stale` turns true; the loop tries again every `retry` s
Redis back, emptied   the epoch differs: known workers stay in view for `grace` seconds, to register again
"""

from __future__ import annotations

import asyncio

import structlog

from tandem.registry.answers import Snapshot
from tandem.registry.errors import RegistryUnavailable
from tandem.registry.registry import Registry
from tandem.registry.worker import LiveWorker

log = structlog.get_logger(__name__)
# A burst of changes within this time, such as a cluster's start, is read once.
SETTLE_S = 0.02


class ClusterView:
    """The live workers as last read. Run `run` as a task: it keeps the view fresh."""

    def __init__(
        self,
        registry: Registry,
        *,
        poll: float = 1.0,
        retry: float = 0.25,
        stale_after: float = 3.0,
        grace: float = 3.0,
    ) -> None:
        self.registry = registry
        self._poll = poll
        self._retry = retry
        self._stale_after = stale_after
        self._grace = grace
        self._epoch = self._policy = ""
        self._all: list[LiveWorker] = []
        self._workers: dict[str, LiveWorker] = {}
        self._orphans: dict[str, LiveWorker] = {}
        self._orphaned_at = 0.0
        self._read_at: float | None = None
        self._changed = asyncio.Event()

    @property
    def workers(self) -> list[LiveWorker]:
        """The workers, sorted by id, as of `age` seconds ago. Each read makes a new list; no list is changed."""
        return self._all

    @property
    def age(self) -> float:
        """Seconds since the view was last read from Redis; infinite before the first read."""
        return float("inf") if self._read_at is None else asyncio.get_running_loop().time() - self._read_at

    @property
    def stale(self) -> bool:
        return self.age > self._stale_after

    async def refresh(self) -> None:
        """Reads the workers now. Raises RegistryUnavailable."""
        self._take(await self.registry.snapshot())

    async def wait_changed(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for a read that changes the list of workers. Returns True if there was one."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Keeps the view fresh until cancelled."""
        while True:
            try:
                await self._follow()
            except RegistryUnavailable as error:
                log.warning(
                    "registry unavailable: serving from the last view", age=round(self.age, 3), error=str(error)
                )
                await asyncio.sleep(self._retry)

    async def _follow(self) -> None:
        async with self.registry.changes() as changes:
            await self._look_at_policy()
            while True:
                await self.refresh()
                if await changes.wait(self._poll):
                    await asyncio.sleep(SETTLE_S)

    async def _look_at_policy(self) -> None:
        """Warns of a Redis that evicts keys; once for each eviction policy."""
        before, self._policy = self._policy, await self.registry.unreadable.evicts()
        if self._policy not in ("", before):
            log.warning(self._policy)

    def _take(self, snapshot: Snapshot) -> None:
        before, now = self._all, asyncio.get_running_loop().time()
        if self._read_at is not None and (snapshot.epoch != self._epoch or self.age > 2 * self._poll):
            self._orphans, self._orphaned_at = {**self._orphans, **self._workers}, now
        self._epoch, self._read_at = snapshot.epoch, now
        self._workers = {worker.info.worker_id: worker for worker in snapshot.workers}
        in_grace = now - self._orphaned_at <= self._grace
        self._orphans = {name: w for name, w in self._orphans.items() if in_grace and name not in self._workers}
        self._all = [worker for _, worker in sorted({**self._orphans, **self._workers}.items())]
        if self._all != before:
            self._changed.set()
