"""Everything outside the process that a gateway uses; a simulation replaces it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpc import aio

from services.gateway.access import Access
from services.gateway.directory import ReadModel
from services.gateway.telemetry import RequestRecords
from tandem import rpc
from tandem.containment import Sandbox
from tandem.liveness import no_pressure
from tandem.process import telemetry
from tandem.registry import Registry
from tandem.store import Store


class Door(Protocol):
    """A server of one ASGI app. `port` is the one it listens on, once it has started."""

    port: int

    async def start(self) -> None:
        """Start accepting connections. Raises OSError."""

    async def run(self) -> None:
        """Wait until the server ends by itself, which is a failure."""

    def close(self) -> None:
        """Stop accepting connections and end idle ones; running requests continue."""

    async def stop(self) -> None:
        """Close, and wait for running requests within a bound."""


Tune = Callable[[str, float], None]  # log level, share of traces


def no_tuning(log_level: str, trace_sampling: float) -> None:
    """Leave the process's logging and tracing as they are."""


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """The outside of a gateway. The gateway closes the registry when it ends."""

    registry: Registry
    connect: Callable[[str], aio.Channel]
    serve: Callable[[Sequence[rpc.Servicer], str, int], Awaitable[rpc.Server]]
    # Takes an ASGI app, host, port, and whether other processes may listen there. None: no HTTP.
    serve_http: Callable[[Any, str, int, bool], Door] | None
    read_model: ReadModel
    new_id: Callable[[], str]  # returns a unique id
    seeds: random.Random  # seeds of requests without one
    wall: Callable[[], float]  # returns Unix seconds
    hostname: str = "localhost"  # this machine's name
    pressure: Callable[[float], float] = no_pressure  # CPU pressure of other processes in the last n seconds
    dead_here: Callable[[str], str] = lambda process: ""  # how this host's kernel says a worker's process died
    sandbox: Sandbox | None = None  # reads input of clients that could do harm
    helpers: Sequence[Sandbox] = ()  # all sandboxes, run by the gateway
    store: Store | None = None  # for responses that are kept; the gateway closes it
    tune: Tune = no_tuning
    records: RequestRecords = field(default_factory=RequestRecords)
    recent: telemetry.RecentSpans = field(default_factory=telemetry.RecentSpans)  # this process's latest spans
    access: Access = field(default_factory=lambda: Access(None, share_prefixes=True))
