"""The gateway in front of its models: what both doors share, and which model a request is for.

    body ── its `model` ──> `llm_for` ──> an LLM: all that follows is of that one model

Two fingerprints of one name, as while other files are rolled out, are two LLMs: each request is wholly of one of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from opentelemetry.trace import Tracer

from services.gateway import versions
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
from services.gateway.model import ModelAsked, ServedAdapters, ServedAliases, ServedModel, Via, choose
from services.gateway.on_demand import Asleep, Sleepers
from services.gateway.settings import MAX_TIMEOUT_S, GatewaySettings
from services.gateway.workers import WorkerConnection
from tandem.aliases import Alias
from tandem.registry import ClusterView, ModelKey, ModelStatus
from tandem.store import Store

if TYPE_CHECKING:
    from services.gateway.llm import LLM

AskedIn = Callable[[bytes], ModelAsked]
# Told now and then to a request that waits for a model; True where it is to be answered by a stream.
Progress = Callable[[bool, ModelStatus], Awaitable[None]]
T = TypeVar("T")


def asked_in(body: bytes) -> ModelAsked:
    """Read a JSON body; nothing where that fails."""
    try:
        return ModelAsked.of(orjson.loads(body))
    except orjson.JSONDecodeError:
        return ModelAsked()


@dataclass(frozen=True, slots=True)
class Listed:
    """A model, an adapter or an alias, as clients see it."""

    model: ServedModel
    llm: LLM
    max_model_len: int
    ready: bool
    alias: Alias | None = None


@dataclass(slots=True)
class FrontDesk:
    settings: GatewaySettings
    view: ClusterView
    metrics: FrontMetrics
    access: Access
    adapters: ServedAdapters
    aliases: ServedAliases
    sleepers: Sleepers
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
        """Names of the models themselves, those that are asleep included."""
        return sorted({*(key.name for key in self.llms), *(status.name for status in self.sleepers.statuses)})

    def only_llm(self) -> LLM | None:
        """The one that answers every request, where no alias and no model that sleeps leaves a choice."""
        if len(self.llms) == 1 and self.aliases.is_empty and self.sleepers.is_empty:
            return next(iter(self.llms.values()))
        return None

    async def llm_for(self, body: bytes, caller: str, session: str = "", read: AskedIn = asked_in) -> LLM:
        """The one that the body names. Of a body that names none that is served, or is malformed, any: its reader
        refuses it.

        Args:
            session: as its headers name it; requests of one have one model.

        Raises:
            GatewayError
        """
        if len(self.llms) < 2 and self.aliases.is_empty and self.sleepers.is_empty:
            return self.llm_of(None)
        if read is not asked_in or is_large(body):
            asked = await self.bodies.read(read, body, caller=caller)
        else:
            asked = read(body)
        try:
            return self.llm_of(asked.model, session or asked.user)
        except Asleep as asleep:
            asleep.streamed = asked.streamed
            raise

    def llm_of(self, name: Any, user: str = "") -> LLM:
        """The one of that name; of an alias, as it is for this user; of an unknown name, any.

        Raises:
            Asleep: it would have to be woken first.
            Unavailable: there is no model at all.
        """
        alias = self.aliases.find(name) if isinstance(name, str) else None
        if alias is None:
            return self._any_of(self._awake(self.base_of(name), name), name)
        return self._through(alias, user or str(self.seeds.getrandbits(64)))

    def _through(self, alias: Alias, user: str) -> LLM:
        via = choose(alias, user, self._serves, lambda model: bool(self.versions(self.base_of(model))))
        return replace(self._any_of(self._awake(self.base_of(via.model), alias.name, user), alias.name), via=via)

    def _serves(self, model: str) -> bool:
        base = self.base_of(model)
        if base is not None and self.sleepers.is_asleep(base):
            return self.sleepers.may_be_woken(base)
        return any(llm.seats for llm in self.versions(base))

    def _any_of(self, base: str | None, asked: Any) -> LLM:
        """One of two fingerprints by the share of seats; where there is none, any model.

        Raises:
            ModelNotFound: there is none that is awake to say so.
            Unavailable: there is no model at all.
        """
        found = self.versions(base) or list(self.llms.values())
        if not found and not self.sleepers.is_empty:
            self.check_named(asked)
            raise ModelNotFound(f"model {asked!r} is not served here", "model", "model_not_found")
        if not found:
            missing = "; ".join(["no worker has registered a model", *self.refusals()])
            raise Unavailable(missing, code="no_workers")
        return versions.chosen(found, self.seeds)

    def _awake(self, base: str | None, asked: Any, user: str = "") -> str | None:
        """The same model, unless it is asleep. Raises Asleep."""
        if base is not None and self.sleepers.is_asleep(base):
            raise Asleep(base, str(asked), user)
        return base

    async def once_awake(
        self, attempt: Callable[[str], Awaitable[T]], client: Caller, deadline: float, progress: Progress
    ) -> T:  # fmt: skip
        """The attempt's result; where a model that it needs is asleep, that of the next one, once the model is awake.

        Args:
            attempt: of a user; "": of its own.

        Raises:
            GatewayError: the attempt's, or that its model will not be awake by the deadline.
        """
        user = ""
        while True:
            try:
                return await attempt(user)
            except Asleep as asleep:
                if not self.allows(client, asleep.asked):
                    raise self.unknown(asleep.asked, client) from None
                user, said, now = asleep.user, partial(progress, asleep.streamed), asyncio.get_running_loop().time
                began = now()
                try:
                    await self.sleepers.until_awake(asleep.model, deadline, said)
                finally:
                    self.metrics.waited(asleep.model, now() - began)

    def answers_elsewhere(self, via: Via | None) -> bool:
        """Another model of the alias has workers, and the one that was chosen has lost its own."""
        alias = self.aliases.find(via.alias) if via else None
        if alias is None or via is None or self._serves(via.model):
            return False
        return alias.choose("", self._serves) is not None

    def is_ready(self, name: str) -> bool:
        """A request for the model of this name would be served."""
        return any(llm.readiness()[0]["ready"] for llm in self.versions(name))

    def running_models(self) -> set[str]:
        """Names of the models that answer requests now."""
        asked = (answer.request.model for answer in self.running)
        named = {model.via.model if model.via else model.name for model in asked}
        return {base for base in map(self.base_of, named) if base is not None}

    def versions(self, name: str | None) -> list[LLM]:
        return [llm for key, llm in self.llms.items() if key.name == name]

    def base_of(self, name: Any) -> str | None:
        """The model that is meant by any of its names, or by one of its adapters; None where there is none."""
        if any(name == key.name for key in self.llms):  # as nearly always
            return str(name)
        names = self.names
        if name in names:
            return str(name)
        if len(names) == 1 and name in self.settings.served_names:
            return names[0]
        adapter = self.adapters.find(name) if isinstance(name, str) else None
        if adapter is None:
            return None
        return adapter.model if adapter.model in names else names[0] if len(names) == 1 else None

    def models(self, client: Caller) -> list[Listed]:
        """Those that have workers and that the client may use, adapters and aliases included."""
        others = self.settings.served_names if len(self.names) == 1 else ()
        names = dict.fromkeys((*self.names, *others, *self.adapters.names, *self.aliases.names))
        listed = (
            self._listed(name) for name in names if self.allows(client, name) and not self.sleepers.is_asleep(name)
        )
        return [one for one in listed if one is not None]

    def asleep(self, client: Caller) -> list[ModelStatus]:
        """Models, and aliases of nothing else, that a request would have to wait for."""
        sleeping = [one for one in self.sleepers.statuses if self.sleepers.is_asleep(one.name)]
        aliases = (
            alias for alias in map(self.aliases.find, self.aliases.names) if alias and not self._listed(alias.name)
        )
        behind = [
            replace(status, name=alias.name)
            for alias in aliases
            for status in sleeping
            if status.name == alias.choose("", lambda name: name in {one.name for one in sleeping})
        ]
        return [one for one in (*sleeping, *behind) if self.allows(client, one.name)]

    def _listed(self, name: str) -> Listed | None:
        alias = self.aliases.find(name)
        names = alias.targets if alias else (name,)
        behind = [versions.largest(self.versions(self.base_of(model))) for model in names]
        llms = [llm for llm in behind if llm is not None]
        if not llms:
            return None
        longest, ready = min(llm.max_model_len for llm in llms), any(llm.readiness()[0]["ready"] for llm in llms)
        model = replace(llms[0].model, name=name) if alias else llms[0].served(name)
        return Listed(model, llms[0], longest, ready, alias)

    def warnings(self) -> list[str]:
        """Describe what serves, and may not be meant."""
        return [why for name in sorted({key.name for key in self.llms}) if (why := versions.mixed(self.versions(name)))]

    def allows(self, client: Caller, name: str) -> bool:
        """A key for the model is one for all of its names."""
        is_other = name in self.settings.served_names
        return client.may_use(name) or (is_other and client.may_use(self.base_of(name) or name))

    def unknown(self, name: str, client: Caller = ANYONE) -> ModelNotFound:
        names = dict.fromkeys((*self.names, *self.aliases.names))
        known = [repr(one) for one in names if self.allows(client, one)]
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
        model = self.llm_of(None).key.name if base is None else base
        taken = {*self.names, *self.settings.served_names, *self.aliases.names}
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
        if len(self.names) > 1:
            self.check_named(name, param)

    def check_named(self, name: Any, param: str = "model") -> None:
        """
        Raises:
            InvalidRequest: no model is named.
        """
        if name is None:
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
        for status in self.sleepers.statuses:
            by_name.setdefault(status.name, Counter())
        served = any(one["ready"] or self.sleepers.may_be_woken(name) for name, one in by_name.items())
        ready = served and not (self.leaving or self.stopping)
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
                | ({"state": sleeper.state} if (sleeper := self.sleepers.find(name)) else {})
                for name, one in by_name.items()
            },
        }
