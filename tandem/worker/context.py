"""The parts that a worker is made from: its ways to the world, and what a role's service gets and adds."""

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
    """A gRPC server that runs."""

    port: int

    async def set_serving(self, serving: bool) -> None: ...
    async def stop(self, grace: float) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """A worker's ways to the world. The worker closes the engine and the registry when it ends."""

    engine: EnginePort
    registry: Registry
    serve: Callable[[Sequence[rpc.Servicer], str, int], Awaitable[RunningServer]]
    links: LinkRuntime  # that carry KV
    new_id: Callable[[], str]
    hostname: str
    secret: ClusterSecret = NO_SECRET
    tiers: KVTiers | None = None  # below the cache
    process: str = ""  # as others of this host know it
    is_gone: Callable[[str], bool] = lambda process: False  # what this host's kernel says of such a process
    pressure: Callable[[float], float] = no_pressure  # of other processes, in the last so many seconds
    oom_kills: Callable[[], int] = lambda: 0  # of this machine's kernel, so far
    recent: telemetry.RecentSpans = field(default_factory=telemetry.RecentSpans)  # of this process
    set_log_level: Callable[[str], None] = lambda level: None
    cold_start: Mapping[str, float] = field(default_factory=dict)  # seconds of its parts, as far as it has come


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
        """Values of WORKER_LABELS."""
        return self.settings.served_name, role, self.worker_id

    @property
    def location(self) -> Location:
        settings = self.settings
        return Location(settings.node or self.ports.hostname, settings.nvlink_domain, settings.zone)

    @property
    def engine(self) -> Engine:
        """For what never changes: layout, cache and model."""
        return self.ports.engine.engine


class WorkerService(Protocol):
    """The part that a role adds: its gRPC services, its side of the KV transfer, and its background tasks."""

    role: Role
    servicers: Sequence[rpc.Servicer]
    transfer_address: str

    def on_events(self, events: Sequence[Event]) -> None:
        """Take the engine's events, in order."""

    def linked(self) -> tuple[str, ...]:
        """Incarnations of the peers that this worker has moved a block to."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Run for the worker's whole life; the end of one is the end of the worker."""

    def num_running(self) -> int:
        """Requests that still run here."""

    def request_ids(self) -> set[str]:
        """Ids of the requests that run here, those that are just being released included."""

    def check_integrity(self) -> IntegrityReport:
        """Report of the role's side of the KV transfer."""

    def end_streams(self) -> None:
        """End the gateways' streams without a word, as the end of the process would."""

    async def hand_over(self) -> None:
        """End what still runs, so that it goes on elsewhere."""

    async def close(self) -> None: ...
