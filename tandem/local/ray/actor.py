"""The content of an actor: one service, a worker in the actor's own process, any other as a child process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Protocol

import ray
import uvloop
from ray.util import get_node_ip_address

from tandem.cluster import Service
from tandem.hosts import EVERYWHERE, address
from tandem.local.launcher import LocalLauncher, is_setting, threads_environment, until_set
from tandem.machine.garbage import starting
from tandem.machine.home import provide_home

# How long a failed service shows its error before its actor ends and Ray starts another.
SHOW_ERROR_S = 3.0
ROLES = ("services.prefill", "services.decode")
# Ray's label of a zone, and Tandem's of an NVLink domain.
LABELS = {"zone": "ray.io/availability-zone", "nvlink_domain": "nvlink-domain"}


@dataclass(frozen=True, slots=True)
class ActorState:
    """An actor's report on its service."""

    name: str
    module: str
    model: str  # "" for a service of all models
    resources: Mapping[str, float]
    address: str
    incarnation: str
    node: str
    pid: int
    ready: bool
    error: str


class _Life(Protocol):
    address: str
    incarnation: str
    ready: bool

    async def run(self) -> None:
        """Runs the service until `stop`, or a failure."""

    def stop(self) -> None:
        """Ends `run`. To be called on the loop that runs it."""


class ServiceActor:
    """An actor: one service, on a thread and an event loop of its own."""

    def __init__(self, service: Service) -> None:
        """Starts the service.

        Raises:
            ValueError: a setting is wrong, or the model cannot be loaded. Ray does not try again.
        """
        for name in filter(is_setting, list(os.environ)):
            del os.environ[name]
        os.environ.update({**threads_environment(service.threads), **service.environment})
        provide_home()
        self._service, self._error, self._stopping = service, "", False
        self._life: _Life = _WorkerLife(service) if service.module in ROLES else _ProcessLife(service)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=service.name, daemon=True)
        self._thread.start()

    def service(self) -> Service:
        return self._service

    def state(self) -> ActorState:
        life, service = self._life, self._service
        ready = life.ready and self._thread.is_alive() and not self._stopping
        node = ray.get_runtime_context().get_node_id()
        model = str(service.settings.get("model_name", ""))
        return ActorState(
            service.name, service.module, model, service.resources, life.address, life.incarnation, node, os.getpid(),
            ready, self._error,
        )  # fmt: skip

    def stop(self) -> None:
        """Drains and ends the service; returns when it has ended.

        The caller must keep Ray from restarting the actor.
        """
        self._stopping = True
        self._loop.call_soon_threadsafe(self._life.stop)
        self._thread.join()

    def _run(self) -> None:
        """Runs the service. An end that was not requested ends the process, so that Ray starts another."""
        try:
            self._loop.run_until_complete(self._life.run())
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        if not self._stopping:
            self._error = self._error or "ended by itself"
            time.sleep(SHOW_ERROR_S)
            os._exit(1)


class _WorkerLife:
    """A worker within this process, built like one in a process of its own."""

    address = incarnation = ""
    ready = False

    def __init__(self, service: Service) -> None:
        starting()
        began = time.monotonic()
        from tandem.process import telemetry
        from tandem.worker import loaded_engine

        self._name, role = service.name, service.module.rpartition(".")[2].title()
        settings_type = getattr(import_module(f"{service.module}.settings"), f"{role}Settings")
        self._build = getattr(import_module(f"{service.module}.server"), f"{role}Worker")
        self._settings = settings_type(**{"host": node_address(), **location_here(), **service.settings})
        traces = telemetry.Traces.FOLLOWED
        self._own = telemetry.set_up(f"tandem-{role.lower()}", service.name, self._settings.log_level, traces)
        process_s = time.monotonic() - began  # excludes the time that Ray's own processes were idle before
        self._engine, start = loaded_engine(self._settings, service.name)
        self._cold_start = {"process": process_s, **start}

    async def run(self) -> None:
        from tandem.worker import probed_worker, process_ports, run_measured, tuned_by

        ports = process_ports(self._settings, self._engine, self._own.recent, tuned_by(self._own))
        ports = replace(ports, cold_start=self._cold_start)
        self._worker = probed_worker(self._settings, self._name, ports, self._build)
        self.incarnation = self._worker.context.incarnation
        announcing = asyncio.create_task(self._announce())
        try:
            await run_measured(self._worker)
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
        try:
            await until_set(self._stopped, self._launcher.watch(restart=True))
        finally:
            await self._launcher.stop()

    def stop(self) -> None:
        self._stopped.set()


def location_here() -> dict[str, str]:
    """Returns the settings of this node's location, by its Ray labels."""
    labels = ray.get_runtime_context().get_node_labels()
    return {name: str(labels[label]) for name, label in LABELS.items() if label in labels}


def node_address() -> str:
    """Returns the address at which other nodes of the cluster reach this node."""
    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def service_address(service: Service) -> str:
    """Returns the Redis URL of a kvstore; host and HTTP port of a gateway."""
    settings = {name: str(value) for name, value in service.settings.items()}
    if service.module == "services.kvstore":
        return settings.get("redis_url") or _own_redis(settings, "redis_port")
    host = settings.get("host", "127.0.0.1")
    return address(node_address() if host in EVERYWHERE else host, settings["http_port"])


def store_address(kvstore: Service) -> str:
    """Returns the URL of the store that a kvstore runs; "" if it runs none."""
    settings = {name: str(value) for name, value in kvstore.settings.items()}
    return _own_redis(settings, "store_port") if "store_port" in settings else ""


def _own_redis(settings: Mapping[str, str], port: str) -> str:
    return f"redis://:{settings.get('redis_password')}@{address(settings.get('host', ''), settings.get(port))}"


def _advertised(service: Service) -> Service:
    """Returns a service whose gateway advertises its node's address by Ray, if it listens at all addresses."""
    if service.module != "services.gateway" or service.settings.get("host") not in EVERYWHERE:
        return service
    return replace(service, settings={"advertise_host": node_address(), **service.settings})
