"""The life of a kvstore process.

1 redis     its own redis-server, unless one is given; started again at the same port should it die
2 serve     gRPC with health and reflection; healthy while Redis answers
3 sweep     every `sweep_s`: what is past its time is forgotten, and Redis is seen to answer
4 end       SIGTERM or SIGINT, or the death of a task: calls end, connections close, the own redis-server stops
"""

from __future__ import annotations

import asyncio
import signal

import structlog

from services.kvstore.server import KVStoreService
from services.kvstore.settings import KVStoreSettings
from tandem import rpc
from tandem.garbage import settled
from tandem.local import RedisServer
from tandem.registry import Registry, RegistryUnavailable
from tandem.rpc import IntegrityService

log = structlog.get_logger(__name__)
WATCH_S = 0.1


class OwnRedis:
    """The redis-server that this process runs. Starting again loses its memory, which workers and gateways bear."""

    def __init__(self, settings: KVStoreSettings) -> None:
        self._settings = settings
        self._server = self._start(settings.redis_port)
        self.url = self._server.url
        self.shown_url = f"redis://{settings.redis_host}:{self._server.port}"

    async def keep(self) -> None:
        """Start it again whenever it dies, until cancelled.

        Raises:
            RuntimeError: it does not start any more.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._server.running:
                log.error("redis-server died: starting it again, empty", port=self._server.port)
                self._server.stop()
                # On this thread on purpose: the child dies with the thread that starts it.
                self._server = self._start(self._server.port)

    def stop(self) -> None:
        self._server.stop()

    def _start(self, port: int) -> RedisServer:
        settings = self._settings
        return RedisServer.start(
            port, host=settings.redis_host, password=settings.redis_password, max_memory_mb=settings.redis_memory_mb
        )


async def sweep(registry: Registry, server: rpc.Server, interval: float) -> None:
    """Forget what is past its time, and report healthy exactly while Redis answers; until cancelled."""
    healthy = False
    while True:
        try:
            swept = await registry.sweep()
            answers = True
            if swept.leases or swept.reservations:
                log.info("swept", leases=swept.leases, reservations=swept.reservations, blocks=swept.blocks)
        except RegistryUnavailable as error:
            answers = False
            log.warning("registry unavailable", error=str(error))
        if answers != healthy:
            healthy = answers
            await server.set_serving(healthy)
        await asyncio.sleep(interval)


async def run(settings: KVStoreSettings) -> None:
    """Keep the registry until a signal.

    Raises:
        OSError, RuntimeError, ValueError: it cannot start, or a task died; the message says why.
    """
    own = None if settings.redis_url else OwnRedis(settings)
    try:
        registry = Registry.connect(own.url if own else settings.redis_url, namespace=settings.namespace)
        try:
            await _serve(settings, registry, own)
        finally:
            await registry.close()
    finally:
        if own:
            own.stop()
    log.info("stopped")


async def _serve(settings: KVStoreSettings, registry: Registry, own: OwnRedis | None) -> None:
    servicers = [KVStoreService(registry).servicer, IntegrityService(registry.check_integrity).servicer]
    server = await rpc.serve(servicers, settings.host, settings.grpc_port, security=settings.security)
    if settings.health_port is not None:
        await server.add_probes(settings.host, settings.health_port)
    tasks = [asyncio.create_task(sweep(registry, server, settings.sweep_s), name="sweep")]
    if own:
        tasks.append(asyncio.create_task(own.keep(), name="redis"))
    settled()
    log.info("serving", host=settings.host, grpc_port=server.port, redis_url=own.shown_url if own else "given")
    try:
        await _stopped_or_failed(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(settings.stop_grace_s)


async def _stopped_or_failed(tasks: list[asyncio.Task[None]]) -> None:
    """Return on SIGTERM or SIGINT; raise what a task died of."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for task in done:
        task.result()
