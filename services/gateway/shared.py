"""Objects that all requests of a gateway share, whatever their model and whatever their API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Tracer

from services.gateway.access import Access, Allowances
from services.gateway.admission import Intake, TextTurns
from services.gateway.bodies import LargeBodies
from services.gateway.deadlines import Deadlines
from services.gateway.errors import GatewayError, InvalidRequest
from services.gateway.generation import (
    TOO_MANY,
    Answer,
    BackgroundTasks,
    CheckedGrammars,
    tracing,
)
from services.gateway.settings import MAX_TIMEOUT_S, GatewaySettings
from services.gateway.telemetry import FrontMetrics, RequestRecords, record_refused
from tandem.registry import ClusterView
from tandem.store import Store


@dataclass(slots=True)
class State:
    """The part of a gateway that changes while it runs. `settings`: those in force now."""

    settings: GatewaySettings
    running: set[Answer] = field(default_factory=set)
    accepted: int = 0
    leaving: bool = False  # load balancers should send no more; requests are still served
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """The gateway's collaborators, made once at its start. Rooms take those that they use from here."""

    state: State
    view: ClusterView
    metrics: FrontMetrics
    access: Access
    allowances: Allowances
    new_id: Callable[[], str]
    spans: Tracer
    seeds: random.Random
    deadlines: Deadlines
    intake: Intake
    bodies: LargeBodies
    text_turns: TextTurns
    grammars: CheckedGrammars
    store: Store | None = None
    records: RequestRecords = field(default_factory=RequestRecords)
    detached: BackgroundTasks = field(default_factory=BackgroundTasks)  # answers that no client waits for

    @property
    def settings(self) -> GatewaySettings:
        return self.state.settings

    def deadline(self, seconds: float | None, param: str | None = None) -> float:
        """Returns the deadline of a request that may take `seconds`, or the default, on the event loop's clock.

        Raises:
            InvalidRequest: naming `param`.
        """
        if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"{param} must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds", param)
        return asyncio.get_running_loop().time() + (self.settings.timeout_s if seconds is None else seconds)

    def refuse(
        self, headers: Mapping[str, str], request_id: str, error: GatewayError, arrived: float, model: str
    ) -> None:
        """Count, trace and record a request that failed before anything was asked of the cluster.

        Args:
            headers: of HTTP, or gRPC metadata.
            arrived: on the event loop's clock.
            model: the only one there is; "" if there are several.
        """
        after_s = asyncio.get_running_loop().time() - arrived
        self.metrics.request("none", error.status)
        self.metrics.error(error)
        if error.status == TOO_MANY:
            self.metrics.refused(after_s, model)
        tracing.refused(self.spans, headers, request_id, error, after_s)
        record_refused(self.records, request_id, error, after_s)
