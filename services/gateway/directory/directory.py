"""The models that a gateway serves, by all of their names: finds the one that a request is for.

    body ── its `model` ──> `llm_for` ──> an LLM: all that follows is of that one model

Two fingerprints of one name, as while other files are rolled out, are two LLMs: each request is wholly of one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import orjson

from services.gateway.access import ANYONE, Caller
from services.gateway.bodies import is_large
from services.gateway.directory import readiness, versions
from services.gateway.directory.llm import LLM
from services.gateway.directory.on_demand import Asleep, Sleepers
from services.gateway.errors import InvalidRequest, ModelNotFound, Unavailable
from services.gateway.model import ModelAsked, ServedAdapters, ServedAliases, ServedModel, Via, choose
from services.gateway.shared import Shared
from services.gateway.workers import WorkerConnection
from tandem.aliases import Alias
from tandem.registry import ModelKey, ModelStatus

AskedIn = Callable[[bytes], ModelAsked]
# Informs a request that waits for a model now and then. The bool: its answer is to be streamed.
Progress = Callable[[bool, ModelStatus], Awaitable[None]]
T = TypeVar("T")


def asked_in(body: bytes) -> ModelAsked:
    """Returns the model that a JSON body names, none if the body cannot be parsed."""
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
class ModelDirectory:
    """The models that a gateway serves, by all of their names."""

    shared: Shared
    adapters: ServedAdapters
    aliases: ServedAliases
    sleepers: Sleepers
    llms: dict[ModelKey, LLM] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # why a worker or a model is not served
    other_releases: str = ""  # releases of Tandem whose workers are in this namespace, if none of this release is

    @property
    def names(self) -> list[str]:
        """The models' own names, sleeping models included."""
        return sorted({*(key.name for key in self.llms), *(status.name for status in self.sleepers.statuses)})

    @property
    def only_name(self) -> str:
        """The model's name if there is exactly one, else ""."""
        names = self.names
        return names[0] if len(names) == 1 else ""

    def only_llm(self) -> LLM | None:
        """Returns the LLM of every request; None if there are several, or aliases or sleeping models."""
        if len(self.llms) == 1 and self.aliases.is_empty and self.sleepers.is_empty:
            return next(iter(self.llms.values()))
        return None

    async def llm_for(self, body: bytes, caller: str, session: str = "", read: AskedIn = asked_in) -> LLM:
        """Returns the LLM that the body names; any, if it names none that is served: its reader refuses it then.

        Args:
            session: by the headers; all requests of one session get the same model.

        Raises:
            GatewayError
        """
        if len(self.llms) < 2 and self.aliases.is_empty and self.sleepers.is_empty:
            return self.llm_of(None)
        if read is not asked_in or is_large(body):
            asked = await self.shared.bodies.read(read, body, caller=caller)
        else:
            asked = read(body)
        try:
            return self.llm_of(asked.model, session or asked.user)
        except Asleep as asleep:
            asleep.streamed = asked.streamed
            raise

    def llm_of(self, name: Any, user: str = "") -> LLM:
        """Returns the LLM of a name; of an alias the one for this user; any, if the name is unknown.

        Raises:
            Asleep: the model must be woken first.
            Unavailable: there is no model at all.
        """
        alias = self.aliases.find(name) if isinstance(name, str) else None
        if alias is None:
            return self._any_of(self._awake(self.base_of(name), name), name)
        return self._through(alias, user or str(self.shared.seeds.getrandbits(64)))

    def _through(self, alias: Alias, user: str) -> LLM:
        via = choose(alias, user, self._serves, lambda model: bool(self.versions(self.base_of(model))))
        return replace(self._any_of(self._awake(self.base_of(via.model), alias.name, user), alias.name), via=via)

    def _serves(self, model: str) -> bool:
        base = self.base_of(model)
        if base is not None and self.sleepers.is_asleep(base):
            return self.sleepers.may_be_woken(base)
        return any(llm.seats for llm in self.versions(base))

    def _any_of(self, base: str | None, asked: Any) -> LLM:
        """Returns the LLM of a model (of two fingerprints one by their seats), or any LLM if the model is unknown.

        Raises:
            ModelNotFound: the model is unknown, and all others sleep.
            Unavailable: there is no model at all.
        """
        found = self.versions(base) or list(self.llms.values())
        if not found and not self.sleepers.is_empty:
            self.check_named(asked)
            raise ModelNotFound(f"model {asked!r} is not served here", "model", "model_not_found")
        if not found:
            missing = "; ".join(["no worker has registered a model", *self.refusals()])
            raise Unavailable(missing, code="no_workers")
        return versions.chosen(found, self.shared.seeds)

    def _awake(self, base: str | None, asked: Any, user: str = "") -> str | None:
        """Returns the same model. Raises Asleep if it sleeps."""
        if base is not None and self.sleepers.is_asleep(base):
            raise Asleep(base, str(asked), user)
        return base

    async def once_awake(
        self, attempt: Callable[[str], Awaitable[T]], client: Caller, deadline: float, progress: Progress
    ) -> T:  # fmt: skip
        """Returns the attempt's result, made again each time that a model it needed has been woken.

        Args:
            attempt: takes the user whose alias decides; "" for the request's own.

        Raises:
            GatewayError: the attempt's own, or the model will not be awake by the deadline.
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
                    self.shared.metrics.waited(asleep.model, now() - began)

    def served(self, llm: LLM, name: str | None, client: Caller = ANYONE) -> ServedModel:
        """Returns the model that the name asks for: the LLM's own, one of its adapters, or through an alias.

        Args:
            name: None only if there is one model.

        Raises:
            InvalidRequest: of several models none is named.
            ModelNotFound: it is unknown, or the client's key does not allow it.
            Unavailable: no model of the alias has workers.
        """
        self.check_said(name)
        if name is None:
            return llm.model
        via = llm.via if llm.via and llm.via.alias == name else None
        if via and not via.model and self.allows(client, name):
            raise Unavailable(f"model {name!r} is an alias, and none of its models has workers", code="no_workers")
        meant = via.model if via else name
        if not self.allows(client, name) or self.base_of(meant) != llm.key.name:
            raise self.unknown(name, client)
        adapter = None if meant == llm.key.name else self.adapters.find(meant)
        if adapter is not None:
            return replace(llm.model.adapted(adapter), name=name, via=via)
        return llm.model if name == llm.model.name and not via else replace(llm.model, name=name, via=via)

    def answers_elsewhere(self, via: Via | None) -> bool:
        """True if the chosen model of an alias lost its workers and another one has some."""
        alias = self.aliases.find(via.alias) if via else None
        if alias is None or via is None or self._serves(via.model):
            return False
        return alias.choose("", self._serves) is not None

    def is_ready(self, name: str) -> bool:
        """True if a request for the model would be served now."""
        return any(readiness.serves(llm) for llm in self.versions(name))

    def running_models(self) -> set[str]:
        """Returns the names of models that answer requests now."""
        asked = (answer.request.model for answer in self.shared.state.running)
        named = {model.via.model if model.via else model.name for model in asked}
        return {base for base in map(self.base_of, named) if base is not None}

    def versions(self, name: str | None) -> list[LLM]:
        return [llm for key, llm in self.llms.items() if key.name == name]

    def base_of(self, name: Any) -> str | None:
        """Returns the model's own name for any of its names or adapters; None if unknown."""
        if any(name == key.name for key in self.llms):  # the usual case
            return str(name)
        names = self.names
        if name in names:
            return str(name)
        adapter = self.adapters.find(name) if isinstance(name, str) else None
        if adapter is None:
            return None
        return adapter.model if adapter.model in names else names[0] if len(names) == 1 else None

    def models(self, client: Caller) -> list[Listed]:
        """Returns the models with workers that the client may use, adapters and aliases included."""
        names = dict.fromkeys((*self.names, *self.adapters.names, *self.aliases.names))
        listed = (
            self._listed(name) for name in names if self.allows(client, name) and not self.sleepers.is_asleep(name)
        )
        return [one for one in listed if one is not None]

    def asleep(self, client: Caller) -> list[ModelStatus]:
        """Returns sleeping models, and aliases of sleeping models alone."""
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
        longest, ready = min(llm.max_model_len for llm in llms), any(readiness.serves(llm) for llm in llms)
        model = replace(llms[0].model, name=name) if alias else self.served(llms[0], name)
        return Listed(model, llms[0], longest, ready, alias)

    def warnings(self) -> list[str]:
        """Returns descriptions of what is served but may be a mistake."""
        return [why for name in sorted({key.name for key in self.llms}) if (why := versions.mixed(self.versions(name)))]

    def allows(self, client: Caller, name: str) -> bool:
        """True if the client may use the model of this name."""
        return client.may_use(name)

    def unknown(self, name: str, client: Caller = ANYONE) -> ModelNotFound:
        names = dict.fromkeys((*self.names, *self.aliases.names))
        known = [repr(one) for one in names if self.allows(client, one)]
        there = f"model {known[0]} is" if len(known) == 1 else f"models {', '.join(known)} are" if known else "none is"
        return ModelNotFound(f"model {name!r} is not served here; {there}", "model", "model_not_found")

    async def load_adapter(self, name: str, path: str, base: str | None) -> None:
        """Raises GatewayError."""
        self.check_said(base, "base_model_name")
        if base is not None and base not in self.names:
            raise self.unknown(base)
        model = self.llm_of(None).key.name if base is None else base
        taken = {*self.names, *self.aliases.names}
        workers = [connection for llm in self.versions(model) for connection in llm.pool.all_connected()]
        await self.adapters.load(name, path, model, taken, workers)

    async def unload_adapter(self, name: str) -> None:
        """Raises GatewayError."""
        await self.adapters.unload(name, [one for one in self.connections if one.connected])

    def check_said(self, name: str | None, param: str = "model") -> None:
        """Raises InvalidRequest: of several models none is named."""
        if len(self.names) > 1:
            self.check_named(name, param)

    def check_named(self, name: Any, param: str = "model") -> None:
        """Raises InvalidRequest: no model is named."""
        if name is None:
            raise InvalidRequest(f"{param} is required: one of {', '.join(self.names)}", param)

    @property
    def connections(self) -> list[WorkerConnection]:
        """The connections to the workers of all models."""
        return [connection for llm in self.llms.values() for connection in llm.pool.connections]

    def refusals(self) -> list[str]:
        """Returns why registered workers, or models, are not served."""
        return [*sorted(self.problems.values()), *([self.other_releases] if self.other_releases else [])]
