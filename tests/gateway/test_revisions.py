"""Workers of two revisions of the weights side by side, as while a new one is rolled out: a pair never mixes them.

Every peer says that it is linked to every other one, so only the KV layouts keep them apart; a prefill peer fails a
request that is to be pushed to another layout.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.__main__ import make_gateway
from services.gateway.settings import Disaggregation
from tandem.local import RedisServer
from tests.gateway.conftest import TEXT, connected, eventually, make_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_failures import everything_free

BODY = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 100}
PAIRS = {("p", "d"), ("p-new", "d-new")}


@pytest.fixture
async def mixed(peers: Peers) -> Peers:
    """One pair of each revision."""
    await peers.add_decode("d-new", revision="revision-2")
    await peers.add_prefill("p-new", revision="revision-2")
    return peers


@asynccontextmanager
async def serving(folder: Path, redis: RedisServer, peers: Peers, policy: Disaggregation) -> AsyncIterator[Any]:
    settings = make_settings(redis, disaggregation=policy)
    await peers.move_to(redis, settings.namespace)
    async with (
        make_gateway(settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http,
    ):
        await eventually(lambda: gateway.readiness()[1]["decode_workers"] == 2)
        await eventually(lambda: all(connected(gateway, peer.info) for peer in peers.workers.values()))
        yield gateway, http


def way(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == TEXT
    return answer.headers.get("x-tandem-prefill-worker", ""), answer.headers["x-tandem-decode-worker"]


async def many(http: httpx.AsyncClient, count: int) -> Counter[tuple[str, str]]:
    """Sends so many requests at once; returns the way that each went."""
    bodies = [BODY | {"prompt": f"once upon {i}"} for i in range(count)]
    return Counter(map(way, await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))))


async def leave(gateway: Gateway, peers: Peers, *names: str) -> None:
    for name in names:
        await peers.workers[name].die()
        await peers.registry.leases.deregister(name, peers.workers[name].info.incarnation)
    await eventually(lambda: {w.info.worker_id for w in gateway.directory.llm_of(None).pool.workers}.isdisjoint(names))


async def test_both_revisions_serve_and_no_pair_mixes_them(
    model_folder: Path, redis: RedisServer, mixed: Peers
) -> None:
    async with serving(model_folder, redis, mixed, Disaggregation.REQUIRE) as (gateway, http):
        assert set(await many(http, 40)) == PAIRS
        await everything_free(mixed, gateway)


async def test_the_readiness_counts_only_pairs_of_one_revision(
    model_folder: Path, redis: RedisServer, mixed: Peers
) -> None:
    async with serving(model_folder, redis, mixed, Disaggregation.REQUIRE) as (_, http):
        assert (await http.get("/health/ready")).json()["linked_pairs"] == len(PAIRS)


async def test_no_pair_mixes_while_redis_is_silent(
    model_folder: Path, mixed: Peers, registry_wait: Callable[[float], None]
) -> None:
    """The last view still names a prefill worker that has died: its decode worker stays idle."""
    registry_wait(0.5)
    with RedisServer.start() as own:
        async with serving(model_folder, own, mixed, Disaggregation.REQUIRE) as (gateway, http):
            own.pause()
            try:
                assert set(await many(http, 12)) == PAIRS
                await mixed.workers["p"].die()
                await eventually(lambda: bool(gateway.directory.llm_of(None).pool.lost()))
                assert set(await many(http, 12)) == {("p-new", "d-new")}
            finally:
                own.resume()


async def test_a_second_try_stays_within_one_revision(model_folder: Path, redis: RedisServer, mixed: Peers) -> None:
    """The old decode worker dies while its prompts are prefilled: both workers of the other revision take over."""
    async with serving(model_folder, redis, mixed, Disaggregation.REQUIRE) as (gateway, http):
        mixed.prefill.hold.clear()
        requests = asyncio.create_task(many(http, 8))
        await eventually(lambda: bool(mixed.prefill.running))
        await mixed.workers["d"].die()
        mixed.prefill.hold.set()
        assert set(await requests) == {("p-new", "d-new")}
        mixed.decode.held.clear()  # it is dead
        await everything_free(mixed, gateway)


async def test_a_revision_without_its_prefill_worker_prefills_itself(
    model_folder: Path, redis: RedisServer, mixed: Peers
) -> None:
    """Nobody borrows a prefill worker of the other revision."""
    async with serving(model_folder, redis, mixed, Disaggregation.PREFER) as (gateway, http):
        await leave(gateway, mixed, "p", "d-new")
        answer = await http.post("/v1/completions", json=BODY)
        assert way(answer) == ("", "d")
        assert "KV layout" in answer.headers["x-tandem-reason"]


async def test_where_pairs_are_required_two_halves_are_none(
    model_folder: Path, redis: RedisServer, mixed: Peers
) -> None:
    async with serving(model_folder, redis, mixed, Disaggregation.REQUIRE) as (gateway, http):
        await leave(gateway, mixed, "p", "d-new")
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert "KV layout" in answer.json()["error"]["message"]
