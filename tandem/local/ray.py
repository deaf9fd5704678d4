"""A cluster on Ray: each service an actor. Ray places, restarts and ends them; tokens and KV never pass through it.

    driver ── Service ──> actor ──(worker: in its own process | gateway, kvstore: a child process)──> gRPC, KV links

A killed actor, or one whose node is gone, is started again by Ray, as a new incarnation; peers notice by its lease.
Removing one drains it first. Only this file imports ray.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from secrets import token_urlsafe
from tempfile import mkdtemp
from typing import Any, Protocol

import ray
import uvloop
from ray.exceptions import RayActorError, RuntimeEnvSetupError
from ray.util import get_node_ip_address, list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.local.cluster import Cluster
from tandem.local.launcher import LocalLauncher, Service, ServiceFailed, is_setting, threads_environment

WATCH_S = 1.0
CALL_S = 5.0
# A worker ends by its own drain time, a process by its launcher's bound; this is beyond both.
STOP_S = 90.0
# How long a failed service shows its error before its actor ends and Ray starts another.
SHOW_ERROR_S = 3.0
ROLES = ("services.prefill", "services.decode")
RESOURCES = {"cpu": "CPU", "nvidia.com/gpu": "GPU", "memory": "memory"}
# Transports that reach no other machine.
ONE_MACHINE = {"shm", "cuda_ipc"}


@dataclass(frozen=True, slots=True)
class State:
    """What an actor says of its service."""

    name: str
    module: str
    address: str
    incarnation: str
    node: str
    pid: int
    ready: bool
    error: str


def connect(address: str, namespace: str, runtime_env: Mapping[str, Any] | None = None) -> None:
    """To the Ray cluster at `address`; "auto": this machine's; "local": one that is started here and ends with this.

    Actors that are then started have `runtime_env`.

    Raises:
        ConnectionError: there is none.
        ValueError: Ray does not take the runtime_env.
    """
    try:
        ray.init(
            address=address, namespace=namespace, runtime_env=dict(runtime_env or {}), ignore_reinit_error=True,
            log_to_driver=False, configure_logging=False,
        )  # fmt: skip
    except (TypeError, ValueError, RuntimeEnvSetupError) as error:
        raise ValueError(f"ray.runtime_env: {error}") from None


def node_address() -> str:
    """Where other nodes of the cluster reach this one."""
    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


class _Life(Protocol):
    address: str
    incarnation: str
    ready: bool

    async def run(self) -> None:
        """Until `stop`, or a failure."""

    def stop(self) -> None:
        """On the loop that runs it."""


class ServiceActor:
    """One service, on a thread and an event loop of its own."""

    def __init__(self, service: Service) -> None:
        """
        Raises:
            ValueError: a setting is wrong, or the model cannot be loaded. Ray does not try again.
        """
        for name in filter(is_setting, list(os.environ)):
            del os.environ[name]
        os.environ |= threads_environment(service.threads)
        self._service, self._error, self._stopping = service, "", False
        self._life: _Life = _WorkerLife(service) if service.module in ROLES else _ProcessLife(service)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=service.name, daemon=True)
        self._thread.start()

    def service(self) -> Service:
        return self._service

    def state(self) -> State:
        life, service = self._life, self._service
        ready = life.ready and self._thread.is_alive() and not self._stopping
        node = ray.get_runtime_context().get_node_id()
        return State(
            service.name, service.module, life.address, life.incarnation, node, os.getpid(), ready, self._error
        )

    def stop(self) -> None:
        """Drain and end it; returns when it has ended. Ray must then be told not to start another."""
        self._stopping = True
        self._loop.call_soon_threadsafe(self._life.stop)
        self._thread.join()

    def _run(self) -> None:
        """An end that was not requested ends the process: so Ray starts another."""
        try:
            self._loop.run_until_complete(self._life.run())
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        if not self._stopping:
            self._error = self._error or "ended by itself"
            time.sleep(SHOW_ERROR_S)
            os._exit(1)


class _WorkerLife:
    """A worker within this process, built as a process of its own would build it."""

    address = incarnation = ""
    ready = False

    def __init__(self, service: Service) -> None:
        from tandem import telemetry
        from tandem.engine import Engine

        self._name, role = service.name, service.module.rpartition(".")[2].title()
        settings_type = getattr(import_module(f"{service.module}.settings"), f"{role}Settings")
        self._build = getattr(import_module(f"{service.module}.server"), f"{role}Worker")
        self._settings = settings_type(**{"host": node_address(), **service.settings})
        telemetry.set_up(f"tandem-{role.lower()}", service.name, self._settings.log_level)
        self._engine = Engine(self._settings.engine_config())

    async def run(self) -> None:
        from tandem.worker import Worker, process_ports, run_to_its_end

        self._worker = Worker(self._settings, self._name, self._build, process_ports(self._settings, self._engine))
        self.incarnation = self._worker.context.incarnation
        announcing = asyncio.create_task(self._announce())
        try:
            await run_to_its_end(self._worker)
        finally:
            announcing.cancel()

    def stop(self) -> None:
        self._worker.stop()

    async def _announce(self) -> None:
        await self._worker.ready.wait()
        self.address, self.ready = self._worker.address, True


class _ProcessLife:
    """A gateway or the kvstore: a child process, started again when it ends."""

    incarnation = ""
    ready = False

    def __init__(self, service: Service) -> None:
        self._service = _advertised(service)
        self._launcher = LocalLauncher(Path(mkdtemp(prefix="tandem-")), print)
        self._stopped = asyncio.Event()
        self.address = service_address(service)

    async def run(self) -> None:
        await self._launcher.start([self._service])
        self.ready = True
        watching, stopped = (
            asyncio.create_task(self._launcher.watch(restart=True)),
            asyncio.create_task(self._stopped.wait()),
        )
        try:
            await asyncio.wait((watching, stopped), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            for task in (watching, stopped):
                task.cancel()
            await asyncio.gather(watching, stopped, return_exceptions=True)
            await self._launcher.stop()

    def stop(self) -> None:
        self._stopped.set()


def service_address(service: Service) -> str:
    """Of the kvstore the URL of its Redis, of a gateway host and port of its HTTP."""
    settings = {name: str(value) for name, value in service.settings.items()}
    if service.module == "services.kvstore":
        own = f"redis://:{settings.get('redis_password')}@{settings.get('redis_host')}:{settings.get('redis_port')}"
        return settings.get("redis_url") or own
    host = settings.get("host", "127.0.0.1")
    return f"{node_address() if host in ('0.0.0.0', '::') else host}:{settings['http_port']}"


def _advertised(service: Service) -> Service:
    """A gateway that listens at every address of its node is reached at the one that Ray knows."""
    if service.module != "services.gateway" or service.settings.get("host") not in ("0.0.0.0", "::"):
        return service
    return replace(service, settings={"advertise_host": node_address(), **service.settings})


def kvstore_on_ray(cluster: Cluster) -> Service:
    """With a Redis that other nodes reach, with a password, where the file names none."""
    return cluster.kvstore_service(redis_host=node_address(), redis_password=token_urlsafe(24))


class RayLauncher:
    """After `connect`. `detached`: services outlive this process; else they end with it."""

    def __init__(self, report: Callable[[str], None], *, detached: bool) -> None:
        self._report = report
        self._detached = detached
        self._said: dict[str, str] = {}
        self._resources: dict[str, Mapping[str, float]] = {}
        self._actors: dict[str, Any] = {name: ray.get_actor(name) for name in _names()}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._actors)

    async def kvstore(self) -> Service | None:
        """The one that runs, with the password of its Redis."""
        if "kvstore" not in self._actors:
            return None
        async with asyncio.timeout(CALL_S):
            service: Service = await self._actors["kvstore"].service.remote()
            return service

    async def start(self, services: Sequence[Service]) -> None:
        """Those that do not run yet. Without the resources for one, it waits for them."""
        for place in places([service for service in services if service.name not in self._actors]):
            for service, strategy in zip(place, self._strategies(place), strict=True):
                self._actors[service.name] = self._create(service, strategy)
                self._resources[service.name] = service.resources

    async def watch(self, *, restart: bool) -> None:
        while True:
            await asyncio.gather(*(self._look_at(name, restart) for name in self._actors))
            await asyncio.sleep(WATCH_S)

    def loading(self) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(self._actors, (0, 0))

    async def states(self) -> dict[str, State | str]:
        """Of each actor, or why it cannot say."""
        names = list(self._actors)
        return dict(zip(names, await asyncio.gather(*map(self._state, names)), strict=True))

    async def stop(self, names: Iterable[str] | None = None) -> None:
        """Drain and end these, or all: gateways first, Redis last."""
        wanted = set(self._actors if names is None else names)
        for group in ("gateway", "", "kvstore"):
            now = [name for name in wanted if _group(name) == group]
            await asyncio.gather(*map(self._end, now))
            self._remove_pairs(now)

    def _create(self, service: Service, strategy: Any) -> Any:
        amounts = _ray_names(service.resources)
        actor = ray.remote(ServiceActor).options(
            name=service.name, lifetime="detached" if self._detached else None, max_restarts=-1, max_task_retries=0,
            max_concurrency=4, num_cpus=amounts.pop("CPU", 0), num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None), resources=amounts, scheduling_strategy=strategy,
        )  # fmt: skip
        return actor.remote(service)

    def _strategies(self, place: Sequence[Service]) -> list[Any]:
        if len(place) == 1:
            here = place[0].module not in ROLES
            node = ray.get_runtime_context().get_node_id()
            return [NodeAffinitySchedulingStrategy(node, soft=False) if here else "SPREAD"]
        bundles = [_ray_names(service.resources) or {"CPU": 0.001} for service in place]
        group = placement_group(
            bundles, strategy="STRICT_PACK", name=_pair_name(place),
            lifetime="detached" if self._detached else None,
        )  # fmt: skip
        return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(len(place))]

    async def _look_at(self, name: str, restart: bool) -> None:
        state = await self._state(name)
        problem = state if isinstance(state, str) else state.error
        if problem and not restart and not problem.startswith("waits"):
            raise ServiceFailed(f"{name}: {problem}")
        said = problem or (f"runs as {state.incarnation}" if isinstance(state, State) and state.incarnation else "")
        if said and self._said.get(name, "" if problem else said) != said:
            self._report(f"{name} {said}")
        if said:
            self._said[name] = said

    async def _state(self, name: str) -> State | str:
        try:
            async with asyncio.timeout(CALL_S):
                state: State = await self._actors[name].state.remote()
                return state
        except TimeoutError:
            return f"waits for its start: {shortage(self._resources.get(name, {}))}"
        except RayActorError as error:
            return f"does not run: {error}".strip()

    async def _end(self, name: str) -> None:
        runs = isinstance(await self._state(name), State)
        actor = self._actors.pop(name)
        try:
            if runs:
                async with asyncio.timeout(STOP_S):
                    await actor.stop.remote()
        except TimeoutError:
            self._report(f"killing {name}, which did not stop in time")
        except RayActorError:
            self._report(f"{name} ended before it was drained")
        ray.kill(actor, no_restart=True)

    def _remove_pairs(self, ended: Iterable[str]) -> None:
        """Placement groups of these that hold no actor any more."""
        for pair in {pair for name in ended for pair in _pairs_of(name)}:
            if not self._actors.keys() & set(pair.split("+")):
                remove_placement_group(get_placement_group(pair))


def places(services: Sequence[Service]) -> list[tuple[Service, ...]]:
    """Who shares a machine: a prefill and a decode worker of one model whose KV stays on one; others are alone."""
    pairs: list[tuple[Service, ...]] = []
    close = [service for service in services if _stays(service)]
    for model in {service.settings["model_name"] for service in close}:
        by_role = [[s for s in close if s.module == role and s.settings["model_name"] == model] for role in ROLES]
        pairs += zip(*by_role, strict=False)
    paired = {service.name for pair in pairs for service in pair}
    return [*pairs, *((service,) for service in services if service.name not in paired)]


def shortage(resources: Mapping[str, float]) -> str:
    """What of these the cluster does not have, or has not free."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    short = [
        f"{name}: {amount:g} needed, {free.get(name, 0):g} free of {total.get(name, 0):g}"
        for name, amount in _ray_names(resources).items()
        if amount > free.get(name, 0)
    ]
    return "; ".join(short) or "it is starting, or no single node has all that it needs"


def _stays(service: Service) -> bool:
    transports = service.settings.get("transports", ())
    named = transports.split(",") if isinstance(transports, str) else transports
    return service.module in ROLES and isinstance(named, list | tuple) and len(named) > 0 and set(named) <= ONE_MACHINE


def _ray_names(resources: Mapping[str, float]) -> dict[str, float]:
    return {RESOURCES.get(name, name): amount for name, amount in resources.items()}


def _names() -> list[str]:
    return [str(name) for name in list_named_actors()]


def _group(name: str) -> str:
    return next((group for group in ("gateway", "kvstore") if name.startswith(group)), "")


def _pair_name(pair: Sequence[Service]) -> str:
    return "+".join(service.name for service in pair)


def _pairs_of(name: str) -> list[str]:
    table = ray.util.placement_group_table().values()
    return [row["name"] for row in table if name in row["name"].split("+") and row["state"] != "REMOVED"]
