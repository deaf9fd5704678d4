"""The gateway in front of its models: what both doors share, and which model a request is for.

    body ── its `model` ──> `llm_for` ──> an LLM: all that follows is of that one model

Two fingerprints of one name, as while other files are rolled out, are two LLMs: each request is wholly of one of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from opentelemetry.trace import Tracer

from services.gateway.access import ANYONE, Access, Allowances, Caller
from services.gateway.admission import Intake, TextTurns
from services.gateway.bodies import LargeBodies, is_large
from services.gateway.deadlines import Deadlines
from services.gateway.errors import GatewayError, InvalidRequest, ModelNotFound, Unavailable
from services.gateway.generation import (
    TOO_MANY,
    Answer,
    BackgroundTasks,
    CheckedGrammars,
    RequestRecords,
    record_refused,
    tracing,
)
from services.gateway.metrics import FrontMetrics
from services.gateway.model import ServedAdapters, ServedModel
from services.gateway.settings import GatewaySettings
from services.gateway.workers import WorkerConnection
from tandem.registry import ClusterView, ModelKey
from tandem.store import Store

if TYPE_CHECKING:
    from services.gateway.llm import LLM

MAX_TIMEOUT_S = 24 * 3600.0
NameOf = Callable[[bytes], Any]


def name_in(body: bytes) -> Any:
    """Whatever a JSON body says as its model; None where it says nothing that could be read."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found.get("model") if isinstance(found, dict) else None


@dataclass(slots=True)
class FrontDesk:
    settings: GatewaySettings
    view: ClusterView
    metrics: FrontMetrics
    access: Access
    adapters: ServedAdapters
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
    llms: dict[ModelKey, LLM] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # workers, or models, that are not served, and why
    other_releases: str = ""  # of Tandem, in this namespace, where there are no workers of this one
    records: RequestRecords = field(default_factory=RequestRecords)
    detached: BackgroundTasks = field(default_factory=BackgroundTasks)  # answers that nobody waits for
    running: set[Answer] = field(default_factory=set)
    accepted: int = 0
    leaving: bool = False  # balancers should send nothing more; what comes is served
    stopping: bool = False

    # --- which model ---

    @property
    def names(self) -> list[str]:
        """Names of the models themselves."""
        return sorted({key.name for key in self.llms})

    async def llm_for(self, body: bytes, caller: str, name_of: NameOf = name_in) -> LLM:
        """The one that the body names. Of a body that names none that is served, or is malformed, any: its reader
        refuses it.

        Raises:
            GatewayError
        """
        if len(self.names) < 2:
            return self.llm_of(None)
        if name_of is not name_in or is_large(body):
            return self.llm_of(await self.bodies.read(name_of, body, caller=caller))
        return self.llm_of(name_of(body))

    def llm_of(self, name: Any) -> LLM:
        """The one of that name; of two fingerprints, by the share of seats; of an unknown name, any.

        Raises:
            Unavailable: there is no model at all.
        """
        found = self.versions(self.base_of(name)) or list(self.llms.values())
        if not found:
            missing = "; ".join(["no worker has registered a model", *self.refusals()])
            raise Unavailable(missing, code="no_workers")
        if len(found) == 1:
            return found[0]
        seats = [llm.seats for llm in found]
        return self.seeds.choices(found, seats)[0] if any(seats) else found[0]

    def versions(self, name: str | None) -> list[LLM]:
        return [llm for key, llm in self.llms.items() if key.name == name]

    def base_of(self, name: Any) -> str | None:
        """The model that is meant by any of its names, or by one of its adapters; None where there is none."""
        names = self.names
        if name in names:
            return str(name)
        if len(names) == 1 and name in self.settings.served_names:
            return names[0]
        adapter = self.adapters.find(name) if isinstance(name, str) else None
        if adapter is None:
            return None
        return adapter.model if adapter.model in names else names[0] if len(names) == 1 else None

    def models(self, client: Caller) -> list[tuple[ServedModel, LLM]]:
        """Those that have workers and that the client may use, adapters included."""
        others = self.settings.served_names if len(self.names) == 1 else ()
        found = []
        for name in dict.fromkeys((*self.names, *others, *self.adapters.names)):
            versions = [llm for llm in self.versions(self.base_of(name)) if llm.pool.workers]
            llm = max(versions, key=lambda one: one.seats, default=None)
            if llm is not None and self.allows(client, name):
                found.append((llm.served(name), llm))
        return found

    def shares(self, name: str) -> dict[str, float]:
        """The part of the model's requests that each fingerprint gets."""
        seats = {llm.key.fingerprint: llm.seats for llm in self.versions(name) if llm.pool.workers}
        whole = sum(seats.values()) or 1
        return {fingerprint: round(count / whole, 4) for fingerprint, count in sorted(seats.items())}

    def allows(self, client: Caller, name: str) -> bool:
        """A key for the model is one for all of its names."""
        is_other = name in self.settings.served_names
        return client.may_use(name) or (is_other and client.may_use(self.base_of(name) or name))

    def unknown(self, name: str, client: Caller = ANYONE) -> ModelNotFound:
        known = [repr(one) for one in self.names if self.allows(client, one)]
        there = f"model {known[0]} is" if len(known) == 1 else f"models {', '.join(known)} are" if known else "none is"
        return ModelNotFound(f"model {name!r} is not served here; {there}", "model", "model_not_found")

    async def load_adapter(self, name: str, path: str, base: str | None) -> None:
        """
        Raises:
            GatewayError
        """
        self.check_said(base, "base_model_name")
        if base is not None and base not in self.names:
            raise self.unknown(base)
        model = self.llm_of(base).key.name
        taken = {*self.names, *self.settings.served_names}
        workers = [connection for llm in self.versions(model) for connection in llm.pool.all_connected()]
        await self.adapters.load(name, path, model, taken, workers)

    async def unload_adapter(self, name: str) -> None:
        """
        Raises:
            GatewayError
        """
        await self.adapters.unload(name, [one for one in self.connections if one.connected])

    def check_said(self, name: str | None, param: str = "model") -> None:
        """
        Raises:
            InvalidRequest: of several models none is named.
        """
        if name is None and len(self.names) > 1:
            raise InvalidRequest(f"{param} is required: one of {', '.join(self.names)}", param)

    # --- what both doors share ---

    def deadline(self, seconds: float | None, param: str | None = None) -> float:
        """When a request ends that may take so long, or the default. On the event loop's clock.

        Raises:
            InvalidRequest: naming `param`.
        """
        if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"{param} must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds", param)
        return asyncio.get_running_loop().time() + (self.settings.timeout_s if seconds is None else seconds)

    def refuse(self, headers: Mapping[str, str], request_id: str, error: GatewayError, arrived: float) -> None:
        """Count, trace and record a request that failed before anything was asked of the cluster.

        Args:
            headers: of HTTP, or gRPC metadata.
            arrived: on the event loop's clock.
        """
        after_s = asyncio.get_running_loop().time() - arrived
        self.metrics.request("none", error.status)
        self.metrics.error(error)
        if error.status == TOO_MANY:
            names = self.names
            self.metrics.refused(after_s, names[0] if len(names) == 1 else "")
        tracing.refused(self.spans, headers, request_id, error, after_s)
        record_refused(self.records, request_id, error, after_s)

    @property
    def connections(self) -> list[WorkerConnection]:
        """To the workers of all models."""
        return [connection for llm in self.llms.values() for connection in llm.pool.connections]

    def refusals(self) -> list[str]:
        """Why workers that there are, or models, are not served."""
        return [*sorted(self.problems.values()), *([self.other_releases] if self.other_releases else [])]

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Says if a request would be served now, and which workers there are."""
        by_name: dict[str, Counter[str]] = {}
        missing: list[str] = []
        for key, llm in sorted(self.llms.items()):
            counts, lacks = llm.readiness()
            by_name.setdefault(key.name, Counter()).update(counts)
            missing += lacks
        ready = not (self.leaving or self.stopping) and any(one["ready"] for one in by_name.values())
        refused = self.refusals()
        if not ready:
            missing = missing or ["; ".join(["decode: no worker with an open stream", *refused])]
            missing = ["the gateway is stopping"] * (self.leaving or self.stopping) + missing
        counted = "prefill_workers", "decode_workers", "linked_pairs", "sequences", "kv_tokens"
        return ready, {
            "ready": ready,
            "missing": [] if ready else missing,
            **{name: sum(one[name] for one in by_name.values()) for name in counted},
            "refused_workers": refused,
            "registry_reached": not self.view.stale,
            "models": {
                name: {"ready": bool(one["ready"]), **{what: one[what] for what in counted}}
                for name, one in by_name.items()
            },
        }
