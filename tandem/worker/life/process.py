"""A worker in a process of its own: it loads an engine, uses real threads and sockets, and stops at a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog
import uvloop
from tqdm import tqdm

from tandem import rpc
from tandem.containment import oom_kills_here
from tandem.engine import Engine, KVLayout, RankDied
from tandem.ids import RandomIds
from tandem.liveness import CpuPressure, gone_here, this_process
from tandem.machine.garbage import settled
from tandem.process import (
    IntegrityReport,
    certificate,
    ends_where_it_stands_still,
    lasting,
    metrics_server,
    telemetry,
)
from tandem.registry import Registry, Role
from tandem.rpc import DrainService
from tandem.tiers import BlockFiles, HostBlocks, KeepRules, KVTier
from tandem.transfer import LinkRuntime
from tandem.worker.context import WorkerContext, WorkerPorts, WorkerService
from tandem.worker.engine import EngineStuck, EngineThread
from tandem.worker.kv import KVTiers
from tandem.worker.life.build import Worker
from tandem.worker.life.crash import open_crash_page
from tandem.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)
INTEGRITY_WAIT_S = 10.0


def run_worker(settings: WorkerSettings, role: Role, build: Callable[[WorkerContext], WorkerService]) -> None:
    """Runs a worker process until a signal stops it. Exits with status 1 and the reason if the worker fails."""
    worker_id = settings.worker_id or f"{role}-{socket.gethostname()}-{settings.grpc_port or uuid4().hex[:6]}"
    traces = telemetry.set_up(f"tandem-{role}", worker_id, settings.log_level, telemetry.Traces.FOLLOWED)
    try:
        process_s = process_age_s()
        engine, start = loaded_engine(settings, worker_id, _Progress(worker_id))
        ports = process_ports(settings, engine, traces.recent, tuned_by(traces))
        uvloop.run(_run(settings, worker_id, replace(ports, cold_start={"process": process_s, **start}), build))
    except (OSError, ValueError, EngineStuck, RankDied) as error:
        raise SystemExit(f"{worker_id}: {error}") from error
    finally:
        traces.close()


def process_age_s() -> float:
    """Returns the seconds since this process started; 0 if the kernel does not report it."""
    try:
        began = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return 0.0


def loaded_engine(
    settings: WorkerSettings, worker_id: str, on_progress: Callable[[str, int, int], None] | None = None
) -> tuple[Engine, dict[str, float]]:
    """Loads the engine. Returns it and the seconds that its weights, and then kernels and KV, have taken."""
    began = weights_at = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal weights_at
        weights_at = time.monotonic()
        if on_progress:
            on_progress(what, done, total)

    page = open_crash_page(settings, worker_id)
    engine = Engine(settings.engine_config(), on_progress=progress, crash_page=page)
    return engine, {"weights": weights_at - began, "kernels": time.monotonic() - weights_at}


def tuned_by(own: telemetry.Telemetry) -> Callable[[str], None]:
    """Returns a function that sets the log level. Which traces a worker records is its gateways' decision."""
    return partial(own.tune, trace_sampling=1.0)


def process_ports(
    settings: WorkerSettings, engine: Engine, recent: telemetry.RecentSpans, set_log_level: Callable[[str], None]
) -> WorkerPorts:
    """Returns real ports: a thread for the engine, sockets for the rest. For any process, also an actor's."""
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=settings.registry_wait_s)
    port = EngineThread(engine)
    return WorkerPorts(
        engine=port,
        registry=registry,
        tiers=KVTiers(port, tiers, lambda: uuid4().hex) if (tiers := _tiers(settings, engine.layout)) else None,
        serve=partial(rpc.serve, security=settings.security, known_as=settings.reachable_host(socket.gethostname())),
        links=LinkRuntime(),
        new_id=RandomIds(),
        hostname=socket.gethostname(),
        secret=settings.security.secret,
        process=this_process(),
        is_gone=gone_here,
        pressure=CpuPressure(),
        oom_kills=oom_kills_here,
        recent=recent,
        set_log_level=set_log_level,
    )


def _tiers(settings: WorkerSettings, layout: KVLayout) -> list[KVTier]:
    """Returns the tiers that the settings ask for, fastest first."""
    block_bytes, tiers = layout.whole_block_bytes, []
    rules = KeepRules(settings.kv_tenant_share, settings.kv_ttl_s, time.time)
    try:
        if settings.kv_host:
            host = HostBlocks(block_bytes=block_bytes, budget_bytes=int(settings.kv_host), rules=rules)
            tiers.append(KVTier("host", host))
        if settings.kv_disk:
            folder, budget_bytes = settings.kv_disk_folder.expanduser(), int(settings.kv_disk)
            files = BlockFiles(folder, layout.hash, block_bytes=block_bytes, budget_bytes=budget_bytes, rules=rules)
            tiers.append(KVTier("disk", files))
    except MemoryError as error:
        raise ValueError(f"kv_host: {error}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        raise ValueError(f"kv_disk_folder: {error}") from None
    return tiers


def probed_worker(
    settings: WorkerSettings, worker_id: str, ports: WorkerPorts, build: Callable[[WorkerContext], WorkerService]
) -> Worker:
    """Returns a worker that also answers probes over HTTP, if the settings name a port for them."""

    async def serve(servicers: Sequence[rpc.Servicer], host: str, port: int) -> rpc.Server:
        server = await rpc.serve(
            servicers, host, port, security=settings.security, known_as=settings.reachable_host(socket.gethostname())
        )
        if settings.health_port is not None:
            await server.add_probes(host, settings.health_port, DrainService(worker.drain).servicer)
        return server

    worker = Worker(settings, worker_id, build, replace(ports, serve=serve))
    return worker


async def _run(
    settings: WorkerSettings, worker_id: str, ports: WorkerPorts, build: Callable[[WorkerContext], WorkerService]
) -> None:
    worker = probed_worker(settings, worker_id, ports, build)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    await run_measured(worker)


async def run_measured(worker: Worker) -> None:
    """Runs a worker to its end and serves its metrics."""
    settings = worker.context.settings
    integrity = partial(_from_a_thread, asyncio.get_running_loop(), worker)
    certificate.watch(worker.context.metrics, settings.security.tls)
    with metrics_server.serving(worker.context.metrics, integrity, settings.host, settings.metrics_port) as port:
        worker.metrics_port = port
        await run_to_its_end(worker)


async def run_to_its_end(worker: Worker) -> None:
    """Runs a worker in a process of its own, or an actor's. The process exits with status 1 if the loop is blocked."""
    settled()
    async with ends_where_it_stands_still():
        await worker.run()


def _from_a_thread(loop: asyncio.AbstractEventLoop, worker: Worker) -> IntegrityReport:
    return asyncio.run_coroutine_threadsafe(lasting(worker.check_integrity), loop).result(INTEGRITY_WAIT_S)


class _Progress:
    """Progress of weight loading: a bar on a terminal, log events elsewhere."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._bar: tqdm[Any] | None = None
        self._tenths = -1

    def __call__(self, what: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            if done * 10 // total > self._tenths:
                self._tenths = done * 10 // total
                log.info("loading", what=what, done=done, total=total)
            return
        if self._bar is None:
            self._bar = tqdm(total=total, desc=f"{self._worker_id} {what}", leave=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None
