"""A worker's lease in the registry: registered, renewed four times per TTL, released. A starved worker's lasts longer.

Redis going away never ends a worker: it serves on and registers again when Redis is back. Being replaced by a newer
incarnation does. So does another worker of the same id that lives. The lease of one that has died is waited for,
where this host's kernel does not know better.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tandem.liveness import stretched
from tandem.registry import Registry, RegistryUnavailable, WorkerIdTaken, WorkerInfo, WorkerLoad, end_lease_of_dead

log = structlog.get_logger(__name__)


class Lease:
    """Keeps `info` registered with the latest `load()`. Run `hold` as a task; its end is the worker's end.

    `on_forgotten` is called when the registry had lost the lease, and with it all that it knew of this worker.
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
        """`is_gone`: whether a process of this host, as it is registered, has ended."""
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
        """Register and renew until cancelled.

        Raises:
            StaleIncarnation: another start of this worker took its place.
            WorkerIdTaken: another worker of this id renews its lease.
            IncompatibleLayout: refused at its registration.
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
        """A lease of another start, somewhere else, is not renewed for long if that one has died."""
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
        """The beats of a starved worker come late."""
        return stretched(self._ttl, self._starvation())

    def renew_now(self) -> None:
        """The load has changed in a way that others wait for: renew without waiting for the next beat."""
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
