"""Which pair of workers takes a request.

Redis answers   select_and_reserve: one atomic decision that every gateway sees, held until released; by the names of
                the prompt's blocks it goes where its beginning is cached, unless load says otherwise
Redis is gone   the last view: the workers with least of this gateway's own work on them, nothing reserved
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import structlog

from services.gateway.errors import InvalidRequest, Unavailable
from services.gateway.settings import Disaggregation
from tandem.block_hash import block_hashes, root_hash
from tandem.registry import (
    ClusterView,
    NoWorkers,
    PrefillPolicy,
    PromptPrefix,
    Registry,
    RegistryUnavailable,
    RequestTooLarge,
    Role,
    Route,
    Worker,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sequence needs of the cluster."""

    request_id: str
    token_ids: Sequence[int]  # of the prompt
    cache_salt: str
    max_new_tokens: int
    seconds: float  # how long a forgotten reservation may live

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)


class Router:
    """Routes and their reservations. Whoever got a route gives it back with `release`."""

    def __init__(self, registry: Registry, view: ClusterView, model: str, policy: Disaggregation) -> None:
        self._registry = registry
        self._view = view
        self._model = model
        self._policy: PrefillPolicy = "require" if policy is Disaggregation.REQUIRE else "prefer"
        self._own: Counter[str] = Counter()

    async def choose(self, wanted: Wanted, exclude: Collection[str]) -> Route:
        """
        Raises:
            InvalidRequest: no worker is large enough.
            Unavailable: no worker can take it now; says what is missing.
        """
        route = await self._route(wanted, exclude)
        self._own.update(worker.info.worker_id for worker in _taking_part(route))
        return route

    async def release_prefill(self, route: Route) -> None:
        """The prompt was read: its tokens no longer wait for anyone."""
        await self._give_back(route, prefill_done_only=True)

    async def release(self, route: Route) -> None:
        """Give the route back. Redis being gone is no error: reservations end by themselves."""
        self._own.subtract(worker.info.worker_id for worker in _taking_part(route))
        self._own += Counter()
        await self._give_back(route, prefill_done_only=False)

    async def _route(self, wanted: Wanted, exclude: Collection[str]) -> Route:
        if self._view.stale:  # not every request should wait for the same silence
            return self._from_view(wanted, exclude, f"registry unavailable for {self._view.age:.0f} s")
        try:
            return await self._registry.select_and_reserve(
                request_id=wanted.request_id,
                model=self._model,
                prompt_tokens=wanted.prompt_tokens,
                max_new_tokens=wanted.max_new_tokens,
                prefill=self._policy,
                prefix=self._prefix(wanted),
                ttl=wanted.seconds,
                exclude=exclude,
            )
        except RegistryUnavailable as error:
            return self._from_view(wanted, exclude, f"registry unavailable: {error}")
        except RequestTooLarge as error:
            raise InvalidRequest(str(error), "max_tokens", "context_length_exceeded") from None
        except NoWorkers as error:
            return self._despite(error, wanted, exclude)

    def _prefix(self, wanted: Wanted) -> PromptPrefix:
        """As the engines of most workers name the prompt's blocks; the others, if any, count as holding none of it."""
        infos = (worker.info for worker in self._view.workers if worker.info.model == self._model)
        kinds = Counter((info.revision, info.block_size) for info in infos)
        if not kinds:
            return PromptPrefix.of("", 1, ())
        revision, block_size = kinds.most_common(1)[0][0]
        root = root_hash(self._model, revision, "", wanted.cache_salt)
        return PromptPrefix.of(revision, block_size, block_hashes(root, wanted.token_ids, block_size))

    async def _give_back(self, route: Route, prefill_done_only: bool) -> None:
        try:
            await self._registry.release(route.reservation_id, prefill_done_only=prefill_done_only)
        except RegistryUnavailable as error:
            log.warning("reservation not given back yet", error=str(error))

    def _despite(self, refusal: NoWorkers, wanted: Wanted, exclude: Collection[str]) -> Route:
        """A Redis that came back empty knows a worker again from its next heartbeat on; the view still does."""
        try:
            return self._from_view(wanted, exclude, str(refusal))
        except Unavailable:
            raise Unavailable(str(refusal), code="no_workers") from None

    def _from_view(self, wanted: Wanted, exclude: Collection[str], why: str) -> Route:
        usable = [w for w in self._view.workers if w.info.model == self._model and _usable(w, exclude)]
        decodes = [w for w in usable if w.info.role is Role.DECODE and _fits(w, wanted)]
        if not decodes:
            raise Unavailable(f"no decode worker of model {self._model} in the last view; {why}", code="no_workers")
        pairs = [(p, d) for p in usable if p.info.role is Role.PREFILL for d in decodes if _linked(p, d)]
        reason = f"chosen from the last view, {why}"
        if pairs:
            prefill, decode = min(pairs, key=self._work)
            return Route(prefill, decode, "", f"remote prefill: {reason}")
        if self._policy == "require":
            raise Unavailable(f"no linked prefill worker of model {self._model} in the last view", code="no_workers")
        return Route(None, min(decodes, key=lambda d: self._work((d,))), "", f"local prefill: no linked pair; {reason}")

    def _work(self, workers: Iterable[Worker]) -> int:
        return sum(self._own[worker.info.worker_id] for worker in workers)


def _taking_part(route: Route) -> list[Worker]:
    return [route.decode] if route.prefill is None else [route.prefill, route.decode]


def _usable(worker: Worker, exclude: Collection[str]) -> bool:
    info = worker.info
    return not worker.load.draining and info.worker_id not in exclude and info.incarnation not in exclude


def _fits(worker: Worker, wanted: Wanted) -> bool:
    tokens = wanted.prompt_tokens + wanted.max_new_tokens
    return tokens <= min(worker.info.max_model_len, worker.info.num_blocks * worker.info.block_size)


def _linked(prefill: Worker, decode: Worker) -> bool:
    return prefill.info.layout_hash == decode.info.layout_hash and decode.info.incarnation in prefill.load.linked
