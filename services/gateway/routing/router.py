"""Chooses the pair of workers for a request.

hash      the prompt's blocks, as most workers of the model name them
look up   who holds how much of it: the gateway's own replica, no round trip
choose    Redis: one atomic decision that every gateway sees, held until released      select_and_reserve
          Redis is gone: the last view and the replica, nothing reserved               OfflineRouter
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from services.gateway.errors import InvalidRequest, Unavailable
from services.gateway.routing.offline import OfflineRouter
from services.gateway.routing.route_request import RouteRequest
from services.gateway.settings import Disaggregation
from tandem.block_hash import block_hashes, root_hash
from tandem.registry import (
    BlockReplica,
    ClusterView,
    Fallback,
    LiveWorker,
    ModelKey,
    NoProvenLink,
    NoWorkers,
    PrefillPolicy,
    PromptPrefix,
    Registry,
    RegistryUnavailable,
    RequestTooLarge,
    Role,
    Route,
)

log = structlog.get_logger(__name__)
POLICIES: dict[Disaggregation, PrefillPolicy] = {
    Disaggregation.REQUIRE: "require",
    Disaggregation.PREFER: "prefer",
    Disaggregation.AUTO: "auto",
}


class Router:
    """Routes and their reservations. Every chosen route must be released."""

    def __init__(
        self, registry: Registry, view: ClusterView, replica: BlockReplica, model: ModelKey, policy: Disaggregation
    ) -> None:
        self._registry = registry
        self._view = view
        self._replica = replica
        self._model = model
        self._policy = POLICIES[policy]
        self._kind_of: tuple[Sequence[LiveWorker], tuple[str, int] | None] = ((), None)
        self._offline = OfflineRouter(view, model, may_be_local=policy is not Disaggregation.REQUIRE)

    async def choose(self, request: RouteRequest, exclude: Collection[str]) -> Route:
        """
        Raises:
            InvalidRequest: no worker is large enough.
            Unavailable: no worker can take it now; names what is missing.
        """
        route = await self._route(request, exclude)
        self._offline.note(route)
        return route

    def release_prefill(self, route: Route) -> asyncio.Future[bool]:
        """Release the prefill part of a route, as the prompt was computed."""
        return self._registry.reservations.release(route.reservation_id, prefill_done_only=True)

    def release(self, route: Route) -> asyncio.Future[bool]:
        """Release a route. If Redis is gone it is told later, and reservations expire by themselves."""
        self._offline.forget(route)
        return self._registry.reservations.release(route.reservation_id)

    async def _route(self, request: RouteRequest, exclude: Collection[str]) -> Route:
        prefix, held = self._look_up(request.token_ids, request.adapter, request.cache_salt)
        if self._view.stale:  # not every request should wait for a silent Redis
            why = f"registry unavailable for {self._view.age:.0f} s"
            return self._offline.choose(request, held, exclude, why, Fallback.REGISTRY_UNAVAILABLE)
        try:
            if request.holder and (route := await self._to_holder(request, prefix, exclude)):
                return route
            return await self._select(request, self._policy, prefix, exclude)
        except RegistryUnavailable as error:
            why = f"registry unavailable: {error}"
            return self._offline.choose(request, held, exclude, why, Fallback.REGISTRY_UNAVAILABLE)
        except RequestTooLarge as error:
            raise InvalidRequest(str(error), "max_tokens", "context_length_exceeded") from None
        except NoWorkers as error:
            return await self._after_refusal(error, request, held, exclude)

    def _adapted(self, adapter: str) -> list[str]:
        """Returns the generations of workers that hold the adapter in memory."""
        return [worker.generation for worker in self._view.workers if adapter in worker.load.adapters]

    async def _to_holder(self, request: RouteRequest, prefix: PromptPrefix, exclude: Collection[str]) -> Route | None:
        """Returns a route to the worker that holds the prompt's KV; None if it cannot take it, or is stuck."""
        decodes = [worker for worker in self._view.workers if worker.info.role is Role.DECODE]
        if any(worker.load.stuck for worker in decodes if worker.info.incarnation == request.holder):
            return None
        others = {worker.info.incarnation for worker in decodes} - {request.holder}
        try:
            route = await self._select(request, "never", prefix, others.union(exclude))
        except (NoWorkers, RequestTooLarge):
            return None
        return replace(route, reason="local prefill: shares the prompt prefilled for the first choice")

    async def _select(
        self, request: RouteRequest, policy: PrefillPolicy, prefix: PromptPrefix, exclude: Collection[str]
    ) -> Route:
        return await self._registry.reservations.select_and_reserve(
            request_id=request.request_id,
            model=self._model.name,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            prefill=policy,
            prefix=prefix,
            adapted=self._adapted(request.adapter) if request.adapter else None,
            ttft_target_s=request.ttft_target_s,
            itl_target_s=request.itl_target_s,
            ttl=request.seconds,
            exclude=exclude,
        )

    def cached_tokens(self, token_ids: Sequence[int], adapter: str, cache_salt: str) -> int:
        """Returns the most tokens of a prompt that any worker has cached, as far as this gateway knows."""
        held = self._look_up(token_ids, adapter, cache_salt)[1]
        return min(max(held.values(), default=0), len(token_ids) - 1)

    def _look_up(self, token_ids: Sequence[int], adapter: str, cache_salt: str) -> tuple[PromptPrefix, dict[str, int]]:
        """Returns the prompt's prefix, and its cached tokens by generation.

        Workers of another revision or block size than most count as holding none of it.
        """
        kind = self._kind()
        if kind is None:
            return PromptPrefix.of("", 1, ()), {}
        revision, block_size = kind
        root = root_hash(self._model.name, revision, adapter, cache_salt)
        hashes = block_hashes(root, token_ids, block_size)
        held = self._replica.holders(hashes)
        tokens = {generation: count * block_size for count, generations in held for generation in generations}
        return PromptPrefix.of(revision, block_size, hashes, held), tokens

    def _kind(self) -> tuple[str, int] | None:
        """Returns the revision and block size of most workers, computed once for each refresh of the view."""
        workers = self._view.workers
        if workers is not self._kind_of[0]:
            kinds = Counter((w.info.revision, w.info.block_size) for w in workers if w.info.key == self._model)
            self._kind_of = workers, kinds.most_common(1)[0][0] if kinds else None
        return self._kind_of[1]

    async def _after_refusal(
        self, refusal: NoWorkers, request: RouteRequest, held: dict[str, int], exclude: Collection[str]
    ) -> Route:
        """Returns a route by the view: a Redis that came back empty knows workers only after their next heartbeat."""
        try:
            return self._offline.choose(request, held, exclude, str(refusal), Fallback.LAST_VIEW)
        except Unavailable:
            code = "no_link" if isinstance(refusal, NoProvenLink) else "no_workers"
            raise Unavailable("; ".join([str(refusal), *await self._other_releases()]), code=code) from None

    async def _other_releases(self) -> list[str]:
        """Returns other releases of Tandem with workers of this model, if this release has none."""
        with suppress(RegistryUnavailable):
            if not any(worker.info.key == self._model for worker in self._view.workers):
                return list(map(str, await self._registry.releases.others()))
        return []
