"""The life of a worker process, the same for both roles.

1 load       engine with its weights and KV cache; progress to the terminal or the log
2 serve      the role's gRPC service, with health and reflection; not healthy yet
3 register   a lease in the registry, renewed by a task; healthy from the first renewal on
4 end        SIGTERM, SIGINT or the death of the engine or of any task: drain, give the lease back, stop
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import uvloop
from tqdm import tqdm

from tandem import rpc, telemetry
from tandem.clock import Clock, SystemClock
from tandem.engine import Engine, SequenceOutput
from tandem.registry import Registry, Role, WorkerInfo, WorkerLoad
from tandem.worker.block_news import BlockNews
from tandem.worker.engine_thread import EngineThread
from tandem.worker.lease import Lease
from tandem.worker.settings import WorkerSettings, mint_incarnation

log = structlog.get_logger(__name__)
STOP_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Host:
    """What a role is built from."""

    settings: WorkerSettings
    worker_id: str
    incarnation: str
    engine: Engine
    thread: EngineThread
    registry: Registry
    clock: Clock
    renew_lease: Callable[[], None]


class WorkerRole(Protocol):
    """What a role adds to the host: its service, its side of the KV transfer, and its background tasks."""

    servicer: rpc.Servicer
    transfer_address: str

    def on_outputs(self, outputs: list[SequenceOutput]) -> None: ...

    def linked(self) -> tuple[str, ...]:
        """Incarnations of the peers that this worker has moved a block to."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Run for the worker's whole life; the end of one is the end of the worker."""

    def num_live(self) -> int:
        """Requests that still run here."""

    def close(self) -> None: ...


def run_worker(settings: WorkerSettings, role: Role, build: Callable[[Host], WorkerRole]) -> None:
    """Run a worker process until it is told to stop. Exits with status 1 and the reason when it fails."""
    worker_id = (
        settings.worker_id or f"{role.value}-{socket.gethostname()}-{settings.grpc_port or mint_incarnation()[:6]}"
    )
    traces = telemetry.set_up(f"tandem-{role.value}", worker_id, settings.log_level)
    try:
        engine = Engine(settings.engine_config(), on_progress=_Progress(worker_id))
        uvloop.run(_serve(settings, role, worker_id, engine, build))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{worker_id}: {error}") from error
    finally:
        traces.close()


async def _serve(
    settings: WorkerSettings, role: Role, worker_id: str, engine: Engine, build: Callable[[Host], WorkerRole]
) -> None:
    clock = SystemClock()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    registry = await Registry.connect(settings.redis_url, clock=clock)
    thread = EngineThread(engine, lambda outputs: worker.on_outputs(outputs), lambda error: _fail(ended, error))
    host = Host(settings, worker_id, mint_incarnation(), engine, thread, registry, clock, lambda: lease.renew_now())
    worker = build(host)
    server = await rpc.serve([worker.servicer], settings.host, settings.grpc_port)
    draining = False

    def load() -> WorkerLoad:
        stats = thread.stats
        return WorkerLoad(
            free_blocks=stats.free_blocks, num_waiting=stats.num_waiting, num_running=stats.num_running,
            queued_tokens=stats.queued_tokens, draining=draining, linked=worker.linked(),
            prefill_tokens_per_s=thread.rates.prefill_tokens_per_s, step_s=thread.rates.step_s,
            transfer_tokens_per_s=thread.rates.transfer_tokens_per_s,
        )  # fmt: skip

    info = _info(host, role, worker.transfer_address, server.port)
    news = BlockNews(thread, registry, worker_id, host.incarnation, clock)
    lease = Lease(registry, info, load, ttl=settings.lease_ttl_s, clock=clock, on_taken_anew=news.tell_all_again)
    thread.start()
    life = (lease.hold(), _announce(lease, server), _after(lease.held, news.tell), *worker.tasks())
    tasks = [asyncio.create_task(task) for task in life]
    _stop_on_signal(ended)
    # What a worker is made of stays until it ends: looking for garbage there would stop every answer for 0.1 s.
    gc.collect()
    gc.freeze()
    for task in tasks:
        task.add_done_callback(lambda done: _task_ended(ended, done))
    try:
        await ended
        draining = True
        lease.renew_now()
        await _drain(worker, settings.drain_s, clock)
    finally:
        await server.stop(STOP_GRACE_S)
        await lease.give_back()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        worker.close()
        thread.close()
        await registry.close()
        computed = {"read": thread.stats.num_read_tokens, "written": thread.stats.num_written_tokens}
        log.info("stopped", worker=worker_id, tokens=computed)


def _info(host: Host, role: Role, transfer_address: str, grpc_port: int) -> WorkerInfo:
    settings, engine = host.settings, host.engine
    return WorkerInfo(
        worker_id=host.worker_id,
        role=role,
        incarnation=host.incarnation,
        grpc_address=f"{settings.reachable_host}:{grpc_port}",
        transfer_address=transfer_address,
        model=settings.served_name,
        revision=engine.layout.revision,
        layout_hash=engine.layout.hash,
        block_size=settings.block_size,
        num_blocks=engine.stats().num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=engine.model_config.max_model_len,
        transports=settings.transports,
        host=socket.gethostname(),
    )


async def _after(event: asyncio.Event, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await event.wait()
    await then()


async def _announce(lease: Lease, server: rpc.Server) -> None:
    """Healthy once registered; then only waits to be cancelled."""
    await lease.held.wait()
    await server.set_serving(True)
    await asyncio.Event().wait()


async def _drain(worker: WorkerRole, seconds: float, clock: Clock) -> None:
    end = clock.now() + seconds
    while worker.num_live() and clock.now() < end:
        await clock.sleep(0.05)


def _stop_on_signal(ended: asyncio.Future[None]) -> None:
    def stop() -> None:
        if not ended.done():
            ended.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _task_ended(ended: asyncio.Future[None], task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _fail(ended, task.exception() or RuntimeError(f"{task.get_coro()} ended by itself"))


def _fail(ended: asyncio.Future[None], error: BaseException) -> None:
    if not ended.done():
        ended.set_exception(error)


class _Progress:
    """Weight loading as a bar on a terminal, or as log events where nobody watches."""

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
