"""The gateway without its process: everything outside comes in as GatewayPorts, so that a simulation can replace it.

1 see       the registry, once; from then on in the background. Redis need not be up yet
2 serve     HTTP and gRPC on one event loop; the models that register (roster.py); ready when one has a path
3 leave     asked to drain: not ready, but serving requests until none has come for a while
4 end       not ready; connections close: gRPC's by GOAWAY, HTTP's by `connection: close` on what comes within
            CLOSING_S; then no connection is accepted, and running requests get `drain_s`, then a typed error; their
            blocks and reservations are released before the process ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import structlog

from services.gateway.access import Allowances
from services.gateway.admission import (
    Admission,
    Capacity,
    FairQueue,
    Intake,
    PriorityClass,
    SequenceTurns,
    TextTurns,
    Weights,
    capacity_of,
)
from services.gateway.apis import build_app
from services.gateway.bodies import LargeBodies
from services.gateway.console import Console
from services.gateway.deadlines import Deadlines
from services.gateway.directory import LLM, ModelDirectory, Roster, Sleepers, of_gateway
from services.gateway.errors import Unavailable
from services.gateway.generation import (
    BackgroundTasks,
    CheckedGrammars,
    ClusterAccess,
    Deaths,
    MigrationLimits,
    Pipeline,
    tracing,
)
from services.gateway.grpc import LLMService
from services.gateway.integrity import check_gateway
from services.gateway.model import ServedAdapters, ServedAliases, ServedModel
from services.gateway.ports import Door, GatewayPorts
from services.gateway.routing import Router
from services.gateway.settings import FOLLOWED, Disaggregation, GatewaySettings
from services.gateway.shared import Shared, State
from services.gateway.telemetry import FrontMetrics, RecentRequests
from services.gateway.workers import Judging, WorkerPool
from tandem import rpc
from tandem.liveness import Starvation
from tandem.process import IntegrityReport, RunningSettings, certificate
from tandem.registry import (
    BlockReplica,
    ClusterView,
    Demands,
    GatewayAddress,
    ModelKey,
    RegistryUnavailable,
)
from tandem.rpc import DrainService

log = structlog.get_logger(__name__)
FREE_WAIT_S = 3.0
GRPC_GRACE_S = 1.0
HEALTH_S = 0.25
# Load balancers send nothing more this long after a gateway turned unready.
QUIET_S = 3.0
IDLE_CHECK_S = 0.05
# Clients learn within this time that their pooled HTTP connections are to be closed.
CLOSING_S = 1.0
# How often an answer may resume on another worker, and how long it waits for one, which may be restarting.
MIGRATIONS, MIGRATION_WAIT_S = 8, 30.0
# Prompt tokens sent to each worker that prefills and not prefilled yet.
PREFILL_QUEUE_TOKENS = 16384


class Gateway:
    """A gateway, which serves inside its async context.

    Args:
        make_router: another Router, for benchmarks.
    """

    def __init__(self, settings: GatewaySettings, ports: GatewayPorts, make_router: type[Router] = Router) -> None:
        self.settings, self._ports, self._make_router = settings, ports, make_router
        self._stack, self._tasks = AsyncExitStack(), list[asyncio.Task[None]]()
        self._background, self._turns = BackgroundTasks(), SequenceTurns()

    async def __aenter__(self) -> Gateway:
        """Raises OSError: an address cannot be bound."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drain()
        await self._stack.aclose()
        log.info("stopped")

    async def failed(self) -> None:
        """Wait until a task of the gateway dies, and raise its error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError("a background task of the gateway ended by itself")

    async def check_integrity(self) -> IntegrityReport:
        return check_gateway(self.directory, self._background)

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Returns whether a request would be served now, and what is missing."""
        return of_gateway(self.directory)

    async def drain(self) -> bool:
        """Turn unready and serve until no request has come or run for QUIET_S. Returns False after `drain_s`."""
        state = self.shared.state
        state.leaving = True
        loop = asyncio.get_running_loop()
        accepted, quiet_since = -1, loop.time()
        try:
            async with asyncio.timeout(self.settings.drain_s):
                while loop.time() < quiet_since + QUIET_S:
                    if state.running or state.accepted != accepted:
                        accepted, quiet_since = state.accepted, loop.time()
                    await asyncio.sleep(IDLE_CHECK_S)
        except TimeoutError:
            return False
        return True

    # --- start ---

    async def _start(self) -> None:
        settings, registry = self.settings, self._ports.registry
        self._stack.push_async_callback(registry.close)
        if self._ports.store:
            self._stack.callback(self._ports.store.close)
        starvation = Starvation(self._ports.pressure)
        self._run(starvation.run())
        self._run(registry.gateways.hold(starvation.now))
        view = await self._first_view()
        self._run(self._ports.access.run())
        for helper in self._ports.helpers:
            self._run(helper.run())
        local = settings.disaggregation is not Disaggregation.REQUIRE
        self._judging = Judging(starvation.now, self._ports.dead_here, decodes_prefill=local)
        self._replica = BlockReplica(registry.block_feed)
        self._run(self._replica.run())
        self.shared = self._make_shared(view)
        self.directory = directory = self._make_directory()
        self._stack.callback(self.shared.records.write)
        for names in (directory.adapters, directory.aliases, directory.sleepers):
            with suppress(RegistryUnavailable):
                await names.refresh()
            self._run(names.run())
        self.shared.metrics.watch_sleepers(lambda: directory.sleepers.statuses)
        roster = Roster(directory, self._ports.read_model, self._make_llm, self._tasks_of)
        self._stack.push_async_callback(roster.close)
        self._run(roster.run())
        self._running = RunningSettings(settings, settings.followed, FOLLOWED, self._take_over)
        self._run(self._running.run())
        self._console = Console(self.directory)
        self._run(self._console.run())
        await roster.settle()
        await self._serve()

    def _make_metrics(self, view: ClusterView) -> FrontMetrics:
        settings, ended = self.settings, self._ports.records.write
        metrics = FrontMetrics(settings.classes, prices=settings.worker_hour_prices, catch_up=ended)
        metrics.watch_view(view)
        metrics.watch_replica(self._replica)
        certificate.watch(metrics.registry, settings.security.tls)
        return metrics

    async def _first_view(self) -> ClusterView:
        view = ClusterView(self._ports.registry)
        try:
            await view.refresh()
        except RegistryUnavailable as error:
            log.warning("registry unavailable: no workers known yet", error=str(error))
        self._run(view.run())
        return view

    def _make_shared(self, view: ClusterView) -> Shared:
        settings, ports = self.settings, self._ports
        return Shared(
            state=State(settings),
            view=view,
            metrics=self._make_metrics(view),
            access=ports.access,
            allowances=Allowances(ports.registry.limits, self._background),
            spans=tracing.tracer(),
            new_id=ports.new_id,
            seeds=ports.seeds,
            deadlines=Deadlines(),
            intake=Intake(),
            bodies=LargeBodies(ports.sandbox),
            text_turns=TextTurns(_weights(settings), settings.max_queued),
            grammars=CheckedGrammars(ports.sandbox),
            store=ports.store,
            records=ports.records,
        )

    def _make_directory(self) -> ModelDirectory:
        registry = self._ports.registry
        return ModelDirectory(
            self.shared,
            ServedAdapters(registry.adapters),
            ServedAliases(registry.aliases, lambda: self.shared.settings.aliases),
            Sleepers(
                registry.on_demand,
                self.settings.models,
                lambda: self.directory.running_models(),
                lambda name: self.directory.is_ready(name),
            ),
        )

    def _make_llm(self, key: ModelKey, model: ServedModel) -> LLM:
        """Returns one model with a queue, pool and pipeline of its own, so that models do not wait for each other."""
        shared, registry, now = self.shared, self._ports.registry, self.shared.settings
        pool = WorkerPool(shared.view, key, self._ports.connect, self._judging)
        cluster = ClusterAccess(
            self._make_router(registry, shared.view, self._replica, key, now.disaggregation), pool, shared.spans,
            self._background, shared.deadlines, self._turns, Deaths(registry.death),
        )  # fmt: skip
        admission = Admission(FairQueue(_weights(now)), now.max_queued)
        metrics = shared.metrics.of(key.name)
        limits = MigrationLimits(MIGRATIONS, MIGRATION_WAIT_S)
        pipeline = Pipeline(cluster, admission, metrics, lambda: self._ports.new_id()[-8:], limits, shared.records)
        return LLM(
            key, model, pool, pipeline, admission, metrics, shared, partial(self.directory.sleepers.note_use, key.name)
        )

    def _tasks_of(self, llm: LLM) -> list[Awaitable[None]]:
        decodes_prefill = self.settings.disaggregation is Disaggregation.AUTO

        def capacity() -> Capacity | None:
            now = self.shared.settings
            return capacity_of(llm.pool.workers, PREFILL_QUEUE_TOKENS, now.max_admitted_tokens, decodes_prefill)

        others = partial(self._ports.registry.gateways.other_demands, llm.key)
        return [llm.pool.run(), llm.admission.run(self.shared.view, capacity, others)]

    def _take_over(self, settings: GatewaySettings) -> None:
        """Apply settings that may change at run time to the requests that come from now on."""
        self.shared.state.settings, weights = settings, _weights(settings)
        for admission in (self.shared.text_turns.admission, *(llm.admission for llm in self.directory.llms.values())):
            admission.take_over(weights, settings.max_queued)
        self._ports.tune(settings.log_level, settings.trace_sampling)

    async def _serve(self) -> None:
        settings = self.settings
        self._grpc = await self._ports.serve([LLMService(self.directory).servicer], settings.host, settings.grpc_port)
        self._stack.push_async_callback(self._grpc.stop, GRPC_GRACE_S)
        if settings.health_port is not None:
            await self._grpc.add_probes(settings.host, settings.health_port, DrainService(self.drain).servicer)
        self._doors = self._make_doors(self._ports.serve_http) if self._ports.serve_http else []
        for door in self._doors:
            self._stack.push_async_callback(door.stop)
            await door.start()
            self._run(door.run())
        self._run(self._tell_health())
        host = settings.reachable_host(self._ports.hostname)
        self.http_port = self._doors[0].port if self._doors else settings.http_port
        own = settings.own_http_port or self.http_port
        addresses = (rpc.address(host, port) for port in (self.http_port, self._grpc.port, own))
        self._ports.registry.gateways.announce(partial(self._announced, list(addresses)))
        log.info("serving", http=self.http_port, grpc=self._grpc.port)

    def _announced(self, addresses: list[str]) -> tuple[GatewayAddress, Demands]:
        demands = {key.text: llm.admission.demand for key, llm in self.directory.llms.items()}
        return GatewayAddress(", ".join(self.directory.names), *addresses), demands

    def _make_doors(self, serve: Callable[[Any, str, int, bool], Door]) -> list[Door]:
        settings = self.settings
        traces = RecentRequests(self._ports.recent, lambda: self.directory.connections)
        app = build_app(self.directory, self._ports.wall, self.check_integrity, traces, self._running, self._console)
        doors = [serve(app, settings.host, settings.http_port, settings.shares_ports)]
        if settings.own_http_port is not None:
            doors.append(serve(app, settings.host, settings.own_http_port, False))
        return doors

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    def _run(self, work: Awaitable[None]) -> None:
        self._tasks.append(task := asyncio.ensure_future(work))
        self._stack.push_async_callback(_end, task)

    async def _tell_health(self) -> None:
        """Keep gRPC health equal to /health/ready."""
        known: bool | None = None
        while True:
            ready, found = self.readiness()
            if ready is not known:
                await self._grpc.set_serving(ready)
                log.info("ready" if ready else "not ready", **found)
            known = ready
            await asyncio.sleep(HEALTH_S)

    # --- end ---

    async def _drain(self) -> None:
        drain_s = self.settings.drain_s
        self.shared.state.leaving = True
        await self._grpc.set_serving(False)
        grpc = asyncio.create_task(self._grpc.stop(drain_s))
        going = asyncio.create_task(self._turn_away())
        await asyncio.wait({going}, timeout=drain_s)
        going.cancel()
        self.shared.state.stopping = True
        stopping = partial(Unavailable, "the gateway is stopping", code="stopping")
        for llm in self.directory.llms.values():
            llm.admission.stop(stopping)
            llm.pool.stop(stopping)
        stops = (door.stop() for door in self._doors)
        await asyncio.gather(grpc, self._grpc.stop(GRPC_GRACE_S), *stops, return_exceptions=True)
        try:
            async with asyncio.timeout(FREE_WAIT_S):
                await self.shared.detached.drain()
                await self._background.drain()
        except TimeoutError:
            log.warning(
                "not everything was freed in time; workers will notice by themselves", left=len(self._background)
            )

    async def _turn_away(self) -> None:
        """Stop accepting connections and wait until no request runs."""
        await asyncio.sleep(min(CLOSING_S, self.settings.drain_s / 10))
        for door in self._doors:
            door.close()
        while self.shared.state.running:
            await asyncio.sleep(IDLE_CHECK_S)


def _weights(settings: GatewaySettings) -> Weights:
    classes = {kind: settings.classes[kind.label].weight for kind in PriorityClass}
    return Weights(classes, settings.tenant_weights)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
