"""A gateway's ways to the world: all that a simulation replaces."""

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
        """Return once connections are taken. Raises OSError."""

    async def run(self) -> None:
        """Until the server ends by itself, which it should not."""

    def close(self) -> None:
        """Take no connections any more, and end those that are idle; what runs goes on."""

    async def stop(self) -> None:
        """`close`, and wait for what runs, within a bound."""


Tune = Callable[[str, float], None]  # log level, share of traces


def no_tuning(log_level: str, trace_sampling: float) -> None:
    """Leave logs and traces as the process has set them up."""


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """A gateway's ways to the world. The gateway closes the registry when it ends."""

    registry: Registry
    connect: Callable[[str], aio.Channel]
    serve: Callable[[Sequence[rpc.Servicer], str, int], Awaitable[rpc.Server]]
    # An ASGI app, host, port, and whether others may listen there; None: no HTTP.
    serve_http: Callable[[Any, str, int, bool], Door] | None
    read_model: ReadModel
    new_id: Callable[[], str]  # a name that nothing else has
    seeds: random.Random  # for requests that bring none
    wall: Callable[[], float]  # Unix seconds
    hostname: str = "localhost"  # of this machine
    pressure: Callable[[float], float] = no_pressure  # of other processes, in the last so many seconds
    dead_here: Callable[[str], str] = lambda process: ""  # what this host's kernel says of a worker's process
    sandbox: Sandbox | None = None  # where what clients send is read that could do harm
    helpers: Sequence[Sandbox] = ()  # all that the gateway runs
    store: Store | None = None  # for what clients ask to be kept; the gateway closes it
    tune: Tune = no_tuning
    records: RequestRecords = field(default_factory=RequestRecords)
    recent: telemetry.RecentSpans = field(default_factory=telemetry.RecentSpans)  # of this process
    access: Access = field(default_factory=lambda: Access(None, share_prefixes=True))
