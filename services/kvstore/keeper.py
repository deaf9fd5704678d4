"""The life of a kvstore process.

1 redis     its own redis-server, unless one is given, and one that evicts where it is asked for; started again at the
            same port should it die
2 serve     gRPC with health and reflection; healthy while Redis answers
3 sweep     every SWEEP_S: what is past its time is forgotten, and Redis is seen to answer; metrics say so
4 end       SIGTERM or SIGINT, or the death of a task: calls end, connections close, the own redis-server stops
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import structlog

from services.kvstore.metrics import KeeperMetrics
from services.kvstore.settings import KVStoreSettings
from tandem import rpc
from tandem.hosts import EVERYWHERE
from tandem.local import RedisServer
from tandem.machine.garbage import settled
from tandem.process import IntegrityReport, certificate, lasting, metrics_server
from tandem.registry import Registry, RegistryUnavailable
from tandem.rpc import IntegrityService

log = structlog.get_logger(__name__)
WATCH_S = 0.1
STOP_GRACE_S = 2.0  # for calls that run at the end
SWEEP_S = 1.0
# Memory bounds of the redis-servers started here.
REGISTRY_MB, STORE_MB = 512, 256
INTEGRITY_WAIT_S = 10.0


class OwnRedis:
    """A redis-server that this process runs. A restart loses its memory, which workers and gateways tolerate."""

    def __init__(
        self, settings: KVStoreSettings, port: int, max_memory_mb: int, died: Callable[[], None], evicts: bool = False
    ) -> None:
        """`died`: called each time the server has died."""
        self._settings, self._max_memory_mb, self._evicts, self._died = settings, max_memory_mb, evicts, died
        self._server = self._start(port)
        self.url = self._server.url
        self.shown_url = f"redis://{settings.host}:{self._server.port}"

    async def keep(self) -> None:
        """Restart the server whenever it dies, until cancelled.

        Raises:
            RuntimeError: the server no longer starts.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._server.running:
                log.error("redis-server died: starting it again, empty", port=self._server.port)
                self._died()
                self._server.stop()
                # On this thread on purpose: the child dies with the thread that started it.
                self._server = self._start(self._server.port)

    def stop(self) -> None:
        self._server.stop()

    def _start(self, port: int) -> RedisServer:
        settings = self._settings
        return RedisServer.start(
            port, host=settings.host, password=settings.redis_password, max_memory_mb=self._max_memory_mb,
            evicts=self._evicts,
        )  # fmt: skip


async def sweep(
    registry: Registry, server: rpc.Server, metrics: KeeperMetrics, interval: float, read_at: str = ""
) -> None:
    """Remove expired rows, and report healthy exactly while Redis answers, until cancelled.

    Args:
        read_at: the address at which Prometheus reads `metrics`.
    """
    healthy, now = False, asyncio.get_running_loop().time
    while True:
        start = now()
        try:
            swept = await registry.sweep(read_at)
            answers = True
            metrics.swept(swept, now() - start)
            if swept.leases or swept.reservations:
                log.info("swept", leases=swept.leases, reservations=swept.reservations, blocks=swept.blocks)
        except RegistryUnavailable as error:
            answers = False
            metrics.up.set(0)
            log.warning("registry unavailable", error=str(error))
        if answers != healthy:
            healthy = answers
            await server.set_serving(healthy)
        await asyncio.sleep(interval)


async def run(settings: KVStoreSettings) -> None:
    """Keep the registry until a signal.

    Raises:
        OSError, RuntimeError, ValueError: it cannot start, or a task died; the message names the reason.
    """
    with ExitStack() as servers:
        metrics = KeeperMetrics()
        died = metrics.redis_deaths.inc
        own = None if settings.redis_url else OwnRedis(settings, settings.redis_port, REGISTRY_MB, died)
        owned = [own] if own else []
        if settings.store_port is not None:
            owned.append(OwnRedis(settings, settings.store_port, STORE_MB, died, evicts=True))
        for server in owned:
            servers.callback(server.stop)
        registry = Registry.connect(own.url if own else settings.redis_url, namespace=settings.namespace)
        try:
            await _serve(settings, registry, owned, metrics, own.shown_url if own else "given")
        finally:
            await registry.close()
    log.info("stopped")


async def _serve(
    settings: KVStoreSettings, registry: Registry, owned: Sequence[OwnRedis], metrics: KeeperMetrics, url: str
) -> None:
    certificate.watch(metrics.registry, settings.security.tls)
    look = partial(_from_a_thread, asyncio.get_running_loop(), registry)
    with metrics_server.serving(metrics.registry, look, settings.host, settings.metrics_port) as port:
        told = port and settings.host not in EVERYWHERE  # an address that others cannot use
        await _serve_rpc(settings, registry, owned, metrics, (url, rpc.address(settings.host, port) if told else ""))


def _from_a_thread(loop: asyncio.AbstractEventLoop, registry: Registry) -> IntegrityReport:
    return asyncio.run_coroutine_threadsafe(lasting(registry.check_integrity), loop).result(INTEGRITY_WAIT_S)


async def _serve_rpc(
    settings: KVStoreSettings, registry: Registry, owned: Sequence[OwnRedis], metrics: KeeperMetrics,
    shown: tuple[str, str],
) -> None:  # fmt: skip
    """Serve gRPC until cancelled. `shown`: Redis's URL, and the address at which Prometheus reads `metrics`."""
    url, read_at = shown
    integrity = IntegrityService(registry.check_integrity).servicer
    server = await rpc.serve([integrity], settings.host, settings.grpc_port, security=settings.security)
    if settings.health_port is not None:
        await server.add_probes(settings.host, settings.health_port)
    tasks = [asyncio.create_task(sweep(registry, server, metrics, SWEEP_S, read_at), name="sweep")]
    tasks += [asyncio.create_task(own.keep(), name="redis") for own in owned]
    settled()
    log.info("serving", host=settings.host, grpc_port=server.port, redis_url=url)
    try:
        await _stopped_or_failed(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(STOP_GRACE_S)


async def _stopped_or_failed(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for SIGTERM or SIGINT. Raises the error that a task died of."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for task in done:
        task.result()
