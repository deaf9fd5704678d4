"""A worker, in any process: it uses no signals and no main thread, and a simulation can replace all its ports.

1 build      the role's service around an engine that is loaded
2 serve      its gRPC service; not healthy yet
3 register   a lease in the registry, renewed by a task; healthy from the first renewal on, or from the first link on
4 drain      `stay`, then take nothing new until no request runs and no gateway holds a reservation, or `drain_s` is
over 5 end        after `stop` and the drain, or when the engine or any task has ended, or a step is stuck: release the
             lease, hand over what still runs, close everything
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from tandem import rpc
from tandem.containment import RAISED, death_of
from tandem.engine import RankDied, SequenceOutput
from tandem.liveness import Starvation
from tandem.process import IntegrityReport, RunningSettings
from tandem.registry import Distance, LiveWorker, RegistryUnavailable, WorkerInfo, WorkerLoad
from tandem.rpc import IntegrityService, ProfileService, SettingsService, TraceService
from tandem.worker.context import RunningServer, WorkerContext, WorkerPorts, WorkerService
from tandem.worker.engine import EngineDied, EngineStuck, Event
from tandem.worker.kv import BlockPublisher, CacheService
from tandem.worker.life.integrity import check_worker
from tandem.worker.life.lease import Lease
from tandem.worker.life.metrics import WorkerCollector
from tandem.worker.life.succession import stay, succeed
from tandem.worker.serving import AdapterService, ModelFilesService
from tandem.worker.settings import FOLLOWED, LEASE_TTL_S, WorkerSettings

log = structlog.get_logger(__name__)
STOP_GRACE_S = 2.0
DRAIN_CHECK_S = 0.05
LINK_CHECK_S = 0.25
ENGINE_CHECK_S = 0.25
# A worker is reported as stuck while a step takes this many times as long as recent ones; more on a busy machine.
STUCK_TIMES, STUCK_S = 4, 1.0
MAX_REPORTED_ADAPTERS = 256  # most adapters in a heartbeat: the last used


class Worker:
    """A worker, made inside a running event loop. `run` it once."""

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        build: Callable[[WorkerContext], WorkerService],
        ports: WorkerPorts,
    ) -> None:
        self.ready = asyncio.Event()  # registered and healthy
        self.address = ""  # where peers reach its gRPC service
        self.metrics_port = 0  # the port of its process's metrics; 0: none
        self._starvation = Starvation(ports.pressure)
        self.context = WorkerContext(
            settings, worker_id, ports.new_id(), ports, lambda: self._lease.renew_now(), self._starvation.now
        )
        ports.engine.engine.crash_page.begin(self.context.incarnation)
        self._ports = ports
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: BaseException | None = None
        self._leaving = asyncio.Event()
        self._told_stuck = False
        self._cold_start, self._held_at = dict(ports.cold_start), 0.0
        self._draining: asyncio.Task[bool] | None = None
        self._files = ModelFilesService(settings.model_path)
        self._running = RunningSettings(
            settings, settings.followed, FOLLOWED, lambda new: ports.set_log_level(new.log_level), is_shared=True
        )
        self._service = build(self.context)
        self.context.metrics.register(
            WorkerCollector(
                lambda: ports.engine.stats, ports.engine.steps, lambda: len(self._adapters_held()),
                self.context.labels(self._service.role), lambda: ports.tiers.stats if ports.tiers else {},
                lambda: self._cold_start,
            )
        )  # fmt: skip

    async def run(self) -> None:
        """Serves until `stop` or a failure, then drains and closes.

        Raises:
            OSError: the address cannot be bound.
            Exception: the error that ended the engine or a task.
        """
        context, ports, service = self.context, self._ports, self._service
        tasks: list[asyncio.Task[Any]] = []
        try:
            server = await ports.serve(self._servicers(), context.settings.host, context.settings.grpc_port)
            try:
                tasks += self._start(server)
                await self._ended
                await self.drain()
            finally:
                if tasks:
                    if ports.engine.ended:
                        await self._report_death()
                        service.end_streams()
                    await self._lease.release()
                    await service.hand_over()
                await server.stop(STOP_GRACE_S)
        finally:
            tasks += [self._draining] if self._draining else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
            self._files.close()
            ports.engine.close()
            await ports.registry.close()
        stats = ports.engine.stats
        computed = {"prefilled": stats.num_prefilled_tokens, "written": stats.num_written_tokens}
        log.info("stopped", worker=context.worker_id, tokens=computed)

    async def check_integrity(self) -> IntegrityReport:
        return await check_worker(self._ports.engine, self._service)

    def _servicers(self) -> list[rpc.Servicer]:
        """Returns the gRPC services of the role, and those that every worker has."""
        return [
            *self._service.servicers,
            IntegrityService(self.check_integrity).servicer,
            AdapterService(self._ports.engine).servicer,
            CacheService(self._ports.engine, self._ports.tiers).servicer,
            self._files.servicer,
            TraceService(self._ports.recent.encoded).servicer,
            ProfileService(self.context.worker_id).servicer,
            SettingsService(self._running).servicer,
        ]

    def stop(self) -> None:
        """Makes the worker refuse new requests, finish its running ones, and end."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def drain(self) -> bool:
        """Refuses new requests, and waits until none is left. Returns False if `drain_s` was over first.

        Once begun, the drain continues even if the caller is cancelled.
        """
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await asyncio.shield(self._draining)

    def _start(self, server: RunningServer) -> list[asyncio.Task[None]]:
        context, registry = self.context, self._ports.registry
        publisher = BlockPublisher(
            self._ports.engine, registry.leases, context.worker_id, context.incarnation, tiers=self._ports.tiers
        )
        info = _info(context, self._service, self._files.fingerprint, server.port, self.metrics_port)
        self.address = info.grpc_address
        self._lease = Lease(
            registry, info, self._load, ttl=LEASE_TTL_S, on_forgotten=publisher.publish_all_again,
            starvation=self._starvation.now, is_gone=self._ports.is_gone,
        )  # fmt: skip
        self._ports.engine.start(partial(self._on_events, publisher), self._fail)
        life = (
            self._lease.hold(), self._announce(server), self._publish(publisher), self._watch_engine(),
            self._starvation.run(), self._running.run(), *self._service.tasks(),
        )  # fmt: skip
        tasks = [asyncio.create_task(task) for task in life]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        return tasks

    def _on_events(self, publisher: BlockPublisher, events: Sequence[Event]) -> None:
        self._service.on_events(events)
        if any(isinstance(event, SequenceOutput) and event.finished for event in events):
            publisher.sequences_ended()

    async def _announce(self, server: RunningServer) -> None:
        """Reports the worker healthy: once registered (or linked) and other releases' gateways are gone, until it
        drains.
        """
        await self._lease.held.wait()
        self._held_at = asyncio.get_running_loop().time()
        while self.context.settings.ready_when == "linked" and not await self._any_of(self._is_linked):
            await asyncio.sleep(LINK_CHECK_S)
        await succeed(self._ports.registry)
        await server.set_serving(True)
        self.ready.set()
        await self._leaving.wait()
        await server.set_serving(False)
        await asyncio.Event().wait()

    def _is_linked(self, worker: LiveWorker) -> bool:
        """True if `worker` is this worker and has moved a block to a peer, or has moved a block to this worker."""
        return self.context.incarnation in worker.load.linked or bool(self._is_us(worker) and worker.load.linked)

    def _is_us(self, worker: LiveWorker) -> bool:
        return worker.info.incarnation == self.context.incarnation

    async def _any_of(self, holds: Callable[[LiveWorker], bool]) -> bool:
        """True if it holds for any worker in the registry; False without a registry."""
        try:
            return any(map(holds, await self._ports.registry.workers()))
        except RegistryUnavailable:
            return False

    async def _publish(self, publisher: BlockPublisher) -> None:
        await self._lease.held.wait()
        await publisher.run()

    async def _watch_engine(self) -> None:
        """Watches the engine until cancelled.

        Raises:
            EngineStuck: a step takes longer than `max_step_s` (times 1 + starvation on a busy machine).
            EngineDied: the engine has ended.
            RankDied: a rank of the engine has ended, or stands still.
        """
        engine, longest = self._ports.engine, self.context.settings.max_step_s
        while engine.busy_s <= longest * (1 + self._starvation.now()):
            engine.engine.ranks.check()
            if self._is_stuck() is not self._told_stuck:
                self._lease.renew_now()
            engine.engine.crash_page.note_oom_kills(self._ports.oom_kills())
            await asyncio.sleep(min(ENGINE_CHECK_S, longest / 2))
            if engine.ended:
                raise EngineDied("the engine has ended")
        raise EngineStuck(f"max_step_s: an engine step is not over after {engine.busy_s:.1f} s")

    def _is_stuck(self) -> bool:
        engine = self._ports.engine
        usual_s = max(STUCK_S, STUCK_TIMES * engine.rates.longest_step_s)
        return engine.busy_s > usual_s * (1 + self._starvation.now())

    async def _drain(self) -> bool:
        drain_s = self.context.settings.drain_s
        end = asyncio.get_running_loop().time() + drain_s
        await stay(self._ports.registry, drain_s / 2)
        self._leaving.set()
        self._lease.renew_now()
        try:
            async with asyncio.timeout_at(end):
                while self._service.num_running() or await self._any_of(self._is_reserved):
                    await asyncio.sleep(DRAIN_CHECK_S)
        except TimeoutError:
            return False
        return True

    async def _report_death(self) -> None:
        """Reports the sequences of the step that raised or killed a rank; gateways ask for them once their streams have
        ended."""
        cause = self._error.cause if isinstance(self._error, RankDied) else RAISED
        death = death_of(self._ports.engine.engine.crash_page.read(), cause)
        if death is not None:
            with suppress(RegistryUnavailable):  # without a report, all sequences that were here stay suspects
                await self._ports.registry.report_death(death)

    def _is_reserved(self, worker: LiveWorker) -> bool:
        """True if `worker` is this worker and has reservations: a gateway will send work, or has yet to release it."""
        return self._is_us(worker) and bool(worker.reserved_tokens or worker.reserved_blocks)

    def _load(self) -> WorkerLoad:
        engine = self._ports.engine
        stats, rates = engine.stats, engine.rates
        self._told_stuck = self._is_stuck()
        if (linked := self._service.linked()) and self._held_at:
            self._cold_start.setdefault("link", asyncio.get_running_loop().time() - self._held_at)
        return WorkerLoad(
            free_blocks=stats.free_blocks, num_waiting=stats.num_waiting, num_running=stats.num_running,
            queued_tokens=stats.queued_tokens, draining=self._leaving.is_set(), linked=linked,
            prefill_tokens_per_s=rates.prefill_tokens_per_s, step_s=rates.step_s,
            transfer_tokens_per_s=rates.transfer_tokens_per_s(Distance.NEAR),
            zone_transfer_tokens_per_s=rates.transfer_tokens_per_s(Distance.ZONE),
            far_transfer_tokens_per_s=rates.transfer_tokens_per_s(Distance.FAR), likely_tokens=stats.likely_tokens,
            stuck=self._told_stuck,
            adapters=tuple(self._adapters_held()[-MAX_REPORTED_ADAPTERS:]),
        )  # fmt: skip

    def _adapters_held(self) -> Sequence[str]:
        adapters = self._ports.engine.engine.adapters
        return adapters.held() if adapters else ()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._fail(task.exception() or RuntimeError(f"{task.get_coro()} ended by itself"))

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._error = error
            self._ended.set_exception(error)


def _info(
    context: WorkerContext, service: WorkerService, fingerprint: str, grpc_port: int, metrics_port: int
) -> WorkerInfo:
    settings, engine, hostname = context.settings, context.engine, context.ports.hostname
    host = settings.reachable_host(hostname)
    return WorkerInfo(
        worker_id=context.worker_id, role=service.role, incarnation=context.incarnation,
        grpc_address=rpc.address(host, grpc_port), transfer_address=service.transfer_address,
        model=settings.served_name, revision=engine.layout.revision, layout_hash=engine.layout.hash,
        block_size=settings.block_size, num_blocks=context.ports.engine.stats.num_blocks,
        max_num_seqs=engine.max_num_seqs, max_model_len=engine.model_config.max_model_len,
        vocab_size=engine.model_config.vocab_size, kept_blocks=context.ports.tiers.size if context.ports.tiers else 0,
        transports=settings.kv_transports, host=hostname, process=context.ports.process, fingerprint=fingerprint,
        tensor_parallel=settings.tensor_parallel,
        metrics_address=rpc.address(host, metrics_port) if metrics_port else "", **context.location._asdict(),
    )  # fmt: skip
