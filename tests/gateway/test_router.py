"""The gateway's choice of workers: what it finds cached, what it releases, and what it does without Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.__main__ import make_gateway
from services.gateway.errors import Unavailable
from services.gateway.routing import Router, RouteRequest
from services.gateway.settings import Disaggregation
from tandem.block_hash import block_hashes, root_hash
from tandem.local import RedisServer
from tandem.registry import THIS_RELEASE, BlockReplica, ClusterView, ModelKey, Registry, Role
from tandem.registry.wire.connection import RedisConnection
from tandem.registry.wire.scripts import FORMAT
from tests.gateway.conftest import eventually, make_settings
from tests.gateway.peers import MODEL as TINY
from tests.gateway.peers import Peers
from tests.gateway.test_life import metrics_of
from tests.registry.cluster import BLOCK_SIZE, MODEL, REVISION, TTL, register_pool, worker_info, worker_load

PROMPT = list(range(4 * BLOCK_SIZE + 3))


def hashes(salt: str = "") -> list[bytes]:
    return block_hashes(root_hash(MODEL, REVISION, "", salt), PROMPT, BLOCK_SIZE)


def wanted(salt: str = "", prompt: Sequence[int] = PROMPT) -> RouteRequest:
    return RouteRequest("r", prompt, salt, 8, 30.0)


class Routing:
    """A router on a Redis of its own."""

    def __init__(self, registry: Registry, policy: Disaggregation) -> None:
        self.registry = registry
        self.view = ClusterView(registry, stale_after=0.5)
        self.replica = BlockReplica(registry.block_feed)
        self.router = Router(registry, self.view, self.replica, ModelKey(MODEL, ""), policy)

    async def see(self) -> None:
        await self.view.refresh()
        await self.replica.refresh()


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture
async def routing(server: RedisServer) -> AsyncIterator[Routing]:
    registry = Registry.connect(server.url, timeout=10.0)
    await register_pool(registry, prefill=2, decode=2)
    yield Routing(registry, Disaggregation.PREFER)
    await registry.close()


async def test_cached_tokens_are_found_by_the_prompts_tokens_and_salt(routing: Routing) -> None:
    await routing.registry.leases.publish_blocks("p1", "p1-first", hashes(), [])
    await routing.registry.leases.publish_blocks("d1", "d1-first", hashes()[:2], [])
    await routing.see()
    route = await routing.router.choose(wanted(), ())
    assert route.prefill is not None
    assert (route.prefill.info.worker_id, route.decode.info.worker_id) == ("p1", "d1")
    assert (route.prefill.cached_tokens, route.decode.cached_tokens) == (64, 32)
    await routing.router.release(route)
    other = await routing.router.choose(wanted(salt="another tenant"), ())
    assert other.reason == "remote prefill: 0 prompt tokens cached there, 0 at decode; preferred"


async def test_a_model_that_another_release_alone_serves_is_refused_with_both_named(server: RedisServer) -> None:
    newer = Registry(RedisConnection(server.url, "tandem", 10.0, FORMAT + 1), 1.0)
    await register_pool(newer)
    here = Routing(Registry.connect(server.url, timeout=10.0), Disaggregation.PREFER)
    await here.see()
    with pytest.raises(Unavailable) as refused:
        await here.router.choose(wanted(), ())
    assert f"(registry format {FORMAT + 1}) are in this namespace; this is {THIS_RELEASE}" in refused.value.message
    await register_pool(here.registry)
    await here.see()
    assert (await here.router.choose(wanted(), ())).decode.info.worker_id == "d0"
    for registry in (newer, here.registry):
        await registry.close()


async def test_without_redis_hits_and_own_work_decide(routing: Routing, server: RedisServer) -> None:
    await routing.registry.leases.publish_blocks("p1", "p1-first", hashes(), [])
    await routing.registry.leases.publish_blocks("d0", "d0-first", hashes(), [])
    await routing.see()
    server.kill()
    route = await routing.router.choose(wanted(), ())
    assert route.prefill is not None
    assert (route.prefill.info.worker_id, route.decode.info.worker_id) == ("p1", "d0")
    assert route.reason.startswith("remote prefill: 64 prompt tokens cached there, 64 at decode; chosen from the last")
    others = [await routing.router.choose(wanted(prompt=[*range(500, 560)]), ()) for _ in range(3)]
    used = [(r.prefill.info.worker_id, r.decode.info.worker_id) for r in others if r.prefill]
    assert used[0] == ("p0", "d1"), "whom this gateway has sent nothing"
    assert {p for p, _ in used} == {"p0", "p1"}
    assert not any(route.reservation_id for route in others)


async def test_without_redis_a_stuck_worker_is_chosen_only_where_all_are(routing: Routing, server: RedisServer) -> None:
    links = ("d0-first", "d1-first")
    await routing.registry.leases.heartbeat(worker_info("p0", Role.PREFILL), worker_load(stuck=True, linked=links), TTL)
    await routing.registry.leases.heartbeat(worker_info("d1", Role.DECODE), worker_load(stuck=True), TTL)
    await routing.see()
    server.kill()
    routes = [await routing.router.choose(wanted(), ()) for _ in range(4)]
    assert {(route.prefill and route.prefill.info.worker_id, route.decode.info.worker_id) for route in routes} == {
        ("p1", "d0")
    }
    assert (await routing.router.choose(wanted(), {"d0"})).decode.info.worker_id == "d1"


async def test_another_choice_of_a_prompt_does_not_follow_the_first_to_a_stuck_worker(routing: Routing) -> None:
    second = replace(wanted(), holder="d0-first")
    await routing.see()
    assert (await routing.router.choose(second, ())).decode.info.worker_id == "d0"
    await routing.registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(stuck=True), TTL)
    await routing.see()
    assert (await routing.router.choose(second, ())).decode.info.worker_id == "d1"


async def test_hits_of_a_worker_that_started_again_are_forgotten_without_redis(
    routing: Routing, server: RedisServer
) -> None:
    await routing.registry.leases.publish_blocks("p1", "p1-first", hashes(), [])
    await routing.see()
    info = worker_info("p1", Role.PREFILL, "second")
    await routing.registry.leases.register(info, worker_load(linked=("d0-first", "d1-first")), TTL)
    await routing.view.refresh()
    server.kill()
    route = await routing.router.choose(wanted(), ())
    assert "0 prompt tokens cached there" in route.reason


async def test_the_replica_is_seen_in_metrics(gateway: Gateway, peers: Peers, http: httpx.AsyncClient) -> None:
    info = peers.workers["p"].info
    names = [number.to_bytes(16, "little") for number in range(10)]
    await peers.registry.leases.publish_blocks("p", info.incarnation, names, [])

    async def told() -> bool:
        found = metrics_of((await http.get("/metrics")).text)
        return (found["tandem_replica_blocks"], found["tandem_replica_dropped_blocks_total"]) == (10, 0)

    await eventually(told)


async def test_auto_prefills_a_short_prompt_at_decode_and_calls_it_no_fallback(
    model_folder: Path, redis: RedisServer, peers: Peers
) -> None:
    settings = make_settings(redis, disaggregation=Disaggregation.AUTO)
    await peers.move_to(redis, settings.namespace)
    base = f"http://127.0.0.1:{settings.http_port}"
    async with make_gateway(settings) as gateway, httpx.AsyncClient(base_url=base, timeout=60) as client:
        await eventually(lambda: gateway.readiness()[0])
        body = {"model": TINY, "prompt": "once", "seed": 0}
        answer = await client.post("/v1/completions", json=body)
        assert answer.headers["x-tandem-reason"].startswith("local prefill: cheapest: ")
        assert "tandem_fallbacks_total{" not in (await client.get("/metrics")).text
