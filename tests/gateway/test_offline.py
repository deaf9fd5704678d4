"""Choosing from the last view: the nearer decode worker, unless it has more to do or its way is the slower one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.gateway.routing.offline import OfflineRouter
from services.gateway.routing.route_request import RouteRequest
from tandem.registry import ClusterView, Fallback, Registry, Role, Route
from tests.registry.cluster import TTL, viewing, worker_info, worker_load
from tests.registry.conftest import connect, namespace, redis_server, registry

__all__ = ["connect", "namespace", "redis_server", "registry"]
# Of the prefill worker, and of decode workers by name.
HERE = {"node": "n0", "zone": "a"}
PLACES = {
    "d-far": {"node": "n2", "zone": "b"},
    "d-near": {"node": "n0", "zone": "a"},
    "d-zone": {"node": "n1", "zone": "a"},
}
REQUEST = RouteRequest("r", range(100), "", 16, 60.0)


@pytest.fixture
async def view(registry: Registry) -> AsyncIterator[ClusterView]:
    for name, place in PLACES.items():
        await registry.leases.register(worker_info(name, Role.DECODE, **place), worker_load(), TTL)
    await prefill(registry)
    async with viewing(registry) as found:
        yield found


async def prefill(registry: Registry, **rates: float) -> None:
    linked = tuple(f"{name}-first" for name in PLACES)
    await registry.leases.register(worker_info("p0", Role.PREFILL, **HERE), worker_load(linked=linked, **rates), TTL)


def choose(router: OfflineRouter, *exclude: str) -> Route:
    return router.choose(REQUEST, {}, exclude, "Redis is gone", Fallback.LAST_VIEW)


def router_of(view: ClusterView) -> OfflineRouter:
    return OfflineRouter(view, view.workers[0].info.key, may_be_local=False)


async def test_the_nearer_one_is_taken_of_those_that_cost_the_same(view: ClusterView) -> None:
    router = router_of(view)
    assert choose(router).decode.info.worker_id == "d-near"
    assert choose(router, "d-near").decode.info.worker_id == "d-zone"
    assert choose(router, "d-near", "d-zone").decode.info.worker_id == "d-far"


async def test_requests_on_their_way_there_are_worth_a_longer_way(view: ClusterView) -> None:
    router = router_of(view)
    taken = []
    for _ in range(6):
        route = choose(router)
        router.note(route)
        taken.append(route.decode.info.worker_id)
    assert taken[0] == "d-near"
    assert set(taken) == PLACES.keys()


async def test_a_way_that_was_measured_to_be_slow_counts_as_slow_as_that(view: ClusterView, registry: Registry) -> None:
    await prefill(
        registry, transfer_tokens_per_s=1000.0, zone_transfer_tokens_per_s=10.0, far_transfer_tokens_per_s=500.0
    )
    await view.refresh()
    assert choose(router_of(view), "d-near").decode.info.worker_id == "d-far"
