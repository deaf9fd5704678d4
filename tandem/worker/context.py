"""The parts of a worker: its ports to the outside, and what a role's service gets and adds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from tandem import rpc
from tandem.engine import Engine
from tandem.liveness import no_pressure
from tandem.process import IntegrityReport, telemetry
from tandem.registry import Location, Registry, Role
from tandem.security import NO_SECRET, ClusterSecret
from tandem.transfer import LinkRuntime
from tandem.worker.engine import EnginePort, Event
from tandem.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tandem.worker.kv import KVTiers


class RunningServer(Protocol):
    """A running gRPC server."""

    port: int

    async def set_serving(self, serving: bool) -> None: ...
    async def stop(self, grace: float) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """A worker's ports to the outside. The worker closes the engine and the registry when it ends."""

    engine: EnginePort
    registry: Registry
    serve: Callable[[Sequence[rpc.Servicer], str, int], Awaitable[RunningServer]]
    links: LinkRuntime  # the links that carry KV
    new_id: Callable[[], str]
    hostname: str
    secret: ClusterSecret = NO_SECRET
    tiers: KVTiers | None = None  # the tiers below the prefix cache
    process: str = ""  # this process's name for others on this host
    # True if this host's kernel knows that the process has ended.
    is_gone: Callable[[str], bool] = lambda process: False
    pressure: Callable[[float], float] = no_pressure  # CPU pressure in the last so many seconds
    oom_kills: Callable[[], int] = lambda: 0  # number of OOM kills by this machine's kernel so far
    recent: telemetry.RecentSpans = field(default_factory=telemetry.RecentSpans)  # this process's spans
    set_log_level: Callable[[str], None] = lambda level: None
    cold_start: Mapping[str, float] = field(default_factory=dict)  # seconds of each phase completed so far


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts that a role's service is built from."""

    settings: WorkerSettings
    worker_id: str
    incarnation: str
    ports: WorkerPorts
    renew_lease: Callable[[], None]
    starvation: Callable[[], float] = lambda: 0.0
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)

    def labels(self, role: Role) -> tuple[str, str, str]:
        """Returns the values of WORKER_LABELS."""
        return self.settings.served_name, role, self.worker_id

    @property
    def location(self) -> Location:
        settings = self.settings
        return Location(settings.node or self.ports.hostname, settings.nvlink_domain, settings.zone)

    @property
    def engine(self) -> Engine:
        """The engine, to read what never changes: layout, cache and model."""
        return self.ports.engine.engine


class WorkerService(Protocol):
    """The part that a role adds: its gRPC services, its side of the KV transfer, and its background tasks."""

    role: Role
    servicers: Sequence[rpc.Servicer]
    transfer_address: str

    def on_events(self, events: Sequence[Event]) -> None:
        """Handles the engine's events, in order."""

    def linked(self) -> tuple[str, ...]:
        """Returns the incarnations of the peers that this worker has moved a block to."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the tasks that run for the worker's whole life: if a task ends, the worker ends."""

    def num_running(self) -> int:
        """Returns the number of requests that still run here."""

    def request_ids(self) -> set[str]:
        """Returns the ids of the requests that run here or are just being released."""

    def check_integrity(self) -> IntegrityReport:
        """Checks the role's side of the KV transfer."""

    def end_streams(self) -> None:
        """Ends the gateways' streams without a message, as the end of the process would."""

    async def hand_over(self) -> None:
        """Ends the requests that still run, so that they resume on other workers."""

    async def close(self) -> None: ...
