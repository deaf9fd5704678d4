"""A worker's lease in the registry: registered, renewed four times per TTL, released. A starved worker's lasts longer.

A worker outlives the loss of Redis: it serves on and registers again when Redis is back. A worker ends when a newer
incarnation has replaced it, or another live worker has its id. It waits for the end of a dead worker's lease, or ends
the lease if this host's kernel knows that the process is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tandem.liveness import stretched
from tandem.registry import Registry, RegistryUnavailable, WorkerIdTaken, WorkerInfo, WorkerLoad, end_lease_of_dead

log = structlog.get_logger(__name__)


class Lease:
    """Keeps `info` registered with the latest `load()`. Run `hold` as a task; when it ends, the worker ends.

    `on_forgotten` is called when the registry had lost the lease, and with it all data of this worker.
    """

    def __init__(
        self,
        registry: Registry,
        info: WorkerInfo,
        load: Callable[[], WorkerLoad],
        *,
        ttl: float,
        on_forgotten: Callable[[], None],
        starvation: Callable[[], float] = lambda: 0.0,
        is_gone: Callable[[str], bool] = lambda process: False,
    ) -> None:
        """`is_gone(process)`: True if a process of this host, by its registered name, has ended."""
        self._registry = registry
        self._info = info
        self._load = load
        self._ttl = ttl
        self._starvation = starvation
        self._is_gone = is_gone
        self._on_forgotten = on_forgotten
        self._changed = asyncio.Event()
        self._patient_until = 0.0
        self.held = asyncio.Event()

    async def hold(self) -> None:
        """Registers the worker and renews its lease until cancelled.

        Raises:
            StaleIncarnation: a newer incarnation has replaced this one.
            WorkerIdTaken: another worker of this id renews its lease.
            IncompatibleLayout: no worker of the other role has its KV layout.
        """
        while True:
            try:
                if not self.held.is_set():
                    await self._register()
                elif await self._registry.leases.heartbeat(self._info, self._load(), self._lasts_s):
                    self._on_forgotten()
            except RegistryUnavailable as error:
                log.warning("registry unavailable", error=str(error))
            await self._wait()

    async def _register(self) -> None:
        """Registers the worker.

        Waits for the lease of an earlier start elsewhere, which expires soon if it has died.
        """
        now = asyncio.get_running_loop().time
        try:
            await self._registry.leases.register(self._info, self._load(), self._lasts_s)
        except WorkerIdTaken as taken:
            if await end_lease_of_dead(self._registry, self._info.worker_id, self._is_gone):
                self.renew_now()
                return
            self._patient_until = self._patient_until or now() + taken.ends_in_s + self._ttl
            if now() > self._patient_until:
                raise
            log.warning("waits for a lease to end", ends_in_s=taken.ends_in_s, error=str(taken))
            return
        self.held.set()
        log.info("registered", worker=self._info.worker_id, incarnation=self._info.incarnation)

    @property
    def _lasts_s(self) -> float:
        """Seconds that the lease lasts: longer for a starved worker, whose heartbeats come late."""
        return stretched(self._ttl, self._starvation())

    def renew_now(self) -> None:
        """Renews the lease immediately, as the load has changed in a way that others wait for."""
        self._changed.set()

    async def release(self) -> None:
        try:
            await self._registry.leases.deregister(self._info.worker_id, self._info.incarnation)
        except RegistryUnavailable:
            log.warning("registry unavailable: the lease will expire by itself")

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._ttl / 4):
                await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self._changed.clear()
