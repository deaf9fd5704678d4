"""Routing while Redis is gone: by this gateway's last view and the requests that it sent itself.

    work = own requests there, each counted as this prompt + what each would have to prefill or be sent of this prompt,
           sending counted by how much longer it takes so far

Nothing is reserved and other gateways are not seen, so this is only as good as one gateway can do alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from services.gateway.errors import Unavailable
from services.gateway.routing.route_request import RouteRequest
from tandem.registry import ClusterView, Distance, Fallback, LiveWorker, ModelKey, Place, Role, Route

# As in the registry's costs: prefilling a token also delays the next request.
OWN_WORK = 16
# Unmeasured, each distance counts as this many times as slow as the next shorter one.
FARTHER = 2


class OfflineRouter:
    """Routes without reservations. `note` each route that begins and `forget` each that ends."""

    def __init__(self, view: ClusterView, model: ModelKey, may_be_local: bool) -> None:
        self._view = view
        self._model = model
        self._may_be_local = may_be_local
        self._own: Counter[str] = Counter()

    def note(self, route: Route) -> None:
        for place in _places(route):
            self._own[place.info.worker_id] += 1

    def forget(self, route: Route) -> None:
        for worker_id in (place.info.worker_id for place in _places(route)):
            self._own[worker_id] -= 1
            if self._own[worker_id] <= 0:
                del self._own[worker_id]

    def choose(
        self, request: RouteRequest, held: Mapping[str, int], exclude: Collection[str], why: str, fallback: Fallback
    ) -> Route:
        """
        Args:
            held: cached tokens of the prompt, by incarnation.
            why: reason for not asking Redis; `fallback`: the same for metrics.

        Raises:
            Unavailable: no worker in the view can take it.
        """
        usable = [w for w in self._view.workers if w.info.key == self._model and _usable(w, exclude)]
        decodes = [w for w in usable if w.info.role is Role.DECODE and _fits(w, request)]
        if not decodes:
            raise Unavailable(
                f"no decode worker of model {self._model.name} in the last view; {why}", code="no_workers"
            )
        pairs = [(p, d) for p in usable if p.info.role is Role.PREFILL for d in decodes if _linked(p, d)]
        reason = f"chosen from the last view, {why}"

        def work(worker: LiveWorker, tokens_times: float) -> float:
            missing = request.prompt_tokens - held.get(worker.generation, 0)
            return self._own[worker.info.worker_id] * request.prompt_tokens + tokens_times * missing

        def place(worker: LiveWorker) -> Place:
            return Place(worker.info, held.get(worker.generation, 0))

        if pairs:
            prefill, decode = min(
                pairs, key=lambda pair: (_stuck(*pair), work(pair[0], OWN_WORK) + work(pair[1], _way(*pair)))
            )
            return Route.of(place(decode), place(prefill), None, "", reason, fallback)
        if not self._may_be_local:
            raise Unavailable(
                f"no linked prefill worker of model {self._model.name} in the last view", code="no_workers"
            )
        decode = min(decodes, key=lambda decode: (_stuck(decode), work(decode, OWN_WORK)))
        return Route.of(place(decode), None, None, "", f"no linked pair; {reason}", fallback)


def _places(route: Route) -> list[Place]:
    return [route.decode] if route.prefill is None else [route.prefill, route.decode]


def _usable(worker: LiveWorker, exclude: Collection[str]) -> bool:
    info = worker.info
    return not worker.load.draining and info.worker_id not in exclude and info.incarnation not in exclude


def _stuck(*workers: LiveWorker) -> bool:
    return any(worker.load.stuck for worker in workers)


def _way(prefill: LiveWorker, decode: LiveWorker) -> float:
    """Returns how many times as long as to the nearest worker KV takes from one to the other."""
    load = prefill.load
    rates = (load.transfer_tokens_per_s, load.zone_transfer_tokens_per_s, load.far_transfer_tokens_per_s)
    distance = prefill.info.location.distance_to(decode.info.location)
    measured = rates[Distance.NEAR] and rates[distance]
    return max(1.0, rates[Distance.NEAR] / rates[distance]) if measured else float(FARTHER**distance)


def _fits(worker: LiveWorker, request: RouteRequest) -> bool:
    tokens = request.prompt_tokens + request.max_new_tokens
    return tokens <= min(worker.info.max_model_len, worker.info.num_blocks * worker.info.block_size)


def _linked(prefill: LiveWorker, decode: LiveWorker) -> bool:
    return prefill.info.layout_hash == decode.info.layout_hash and decode.info.incarnation in prefill.load.linked
