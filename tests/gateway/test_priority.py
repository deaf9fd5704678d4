"""Classes, tenants and the waiting line, through both doors of a gateway whose cluster is full."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway
from services.gateway.__main__ import make_gateway
from tandem import rpc
from tandem.local import RedisServer
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually, make_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_failures import everything_free
from tests.gateway.test_life import metrics_of

TENANT = "x-llm-d-inference-fairness-id"
PROMPT_TOKENS, NEW_TOKENS = 4, 40
BODY = {"model": MODEL, "prompt": [5] * PROMPT_TOKENS, "seed": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
COST = PROMPT_TOKENS + NEW_TOKENS


class GatewayAndPeers:
    """A gateway in front of peers, and requests that run beside the test."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, service: Any, peers: Peers) -> None:
        self.gateway, self.http, self.service, self.peers = gateway, http, service, peers
        self.requests: list[asyncio.Task[httpx.Response]] = []

    async def send(self, tenant: str = "a", timeout_ms: int = 60_000, **said: Any) -> asyncio.Task[httpx.Response]:
        """Returns once the request is inside or waits."""
        before = self.known
        headers = {TENANT: tenant, "x-request-timeout-ms": str(timeout_ms)}
        self.requests.append(asyncio.create_task(self.http.post("/v1/completions", json=BODY | said, headers=headers)))
        await eventually(lambda: self.known > before or self.requests[-1].done())
        return self.requests[-1]

    @property
    def waiting(self) -> int:
        return len(self.gateway.directory.llm_of(None).admission._queue)

    @property
    def known(self) -> int:
        return self.waiting + len(self.peers.decode.seen)

    @property
    def order(self) -> list[str]:
        """The tenants of the sequences that reached the decode worker."""
        return [spec.tenant for spec in self.peers.decode.seen]

    async def close(self) -> None:
        for request in self.requests:
            request.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)


@pytest.fixture
async def full(model_folder: Path, redis: RedisServer, peers: Peers) -> AsyncIterator[GatewayAndPeers]:
    """Admitted for one at a time; six more may wait. Who is inside stays until the test lets go."""
    async with cluster_of(model_folder, redis, peers, max_admitted_tokens=COST, max_queued=6) as cluster:
        peers.decode.step_s = 0.002
        peers.prefill.hold.clear()
        yield cluster


@asynccontextmanager
async def cluster_of(
    model_folder: Path, redis: RedisServer, peers: Peers, **other: Any
) -> AsyncIterator[GatewayAndPeers]:
    settings = make_settings(redis, **other)
    await peers.move_to(redis, settings.namespace)
    async with (
        make_gateway(settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http,
        rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        await eventually(lambda: gateway.readiness()[0])
        cluster = GatewayAndPeers(gateway, http, llm_pb2_grpc.LLMServiceStub(channel), peers)
        try:
            yield cluster
        finally:
            peers.prefill.hold.set()
            await cluster.close()
            await everything_free(peers, gateway)


# --- names ---


@pytest.mark.parametrize(
    ("said", "priority"),
    [
        ({}, 0),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "default"}, 0),
        ({"service_tier": "priority"}, -100),
        ({"service_tier": "scale"}, -100),
        ({"service_tier": "flex"}, 100),
        ({"service_tier": "fast"}, 0),
        ({"service_tier": "fast", "priority": 7}, 7),
        ({"service_tier": None, "priority": 7}, 7),
        ({"service_tier": "auto", "priority": -7}, -7),
    ],
)
async def test_classes_by_http(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers, said: dict[str, Any], priority: int
) -> None:
    assert (await http.post("/v1/completions", json=BODY | said)).status_code == 200
    assert peers.decode.seen[0].priority == peers.prefill.seen[0].priority == priority
    kind = "realtime" if priority < 0 else "batch" if priority else "interactive"
    name = f'vllm:request_queue_time_seconds_count{{model_name="{MODEL}",priority_class="{kind}"}}'
    assert metrics_of((await http.get("/metrics")).text)[name] == 1


@pytest.mark.parametrize(
    ("headers", "user", "tenant"),
    [
        ({TENANT: "acme"}, "someone", "acme"),
        ({}, "someone", "someone"),
        ({"authorization": "Bearer secret"}, "someone", "someone"),
        ({"authorization": "Bearer secret"}, None, "key-"),
        ({}, None, ""),
    ],
)
async def test_tenants_by_both_doors(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers, headers: dict[str, str], user: str | None, tenant: str
) -> None:
    await http.post("/v1/completions", json=BODY | {"user": user}, headers=headers)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        asked = llm_pb2.GenerateRequest(model=MODEL, prompt="x", tenant=user or "")
        await llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(
            llm_pb2.GenerateUnaryRequest(generate=asked), metadata=tuple(headers.items())
        )
    one, other = (spec.tenant for spec in peers.decode.seen)
    assert one == other
    assert one.startswith(tenant) if tenant == "key-" else one == tenant
    assert "secret" not in one


# --- order ---


async def test_a_flood_of_batch_does_not_hold_up_realtime(full: GatewayAndPeers) -> None:
    for _ in range(4):
        await full.send("flood", service_tier="flex")
    await full.send("normal")
    urgent = await full.send("urgent", service_tier="priority")
    assert full.order == ["flood"]
    full.peers.prefill.hold.set()
    assert (await urgent).status_code == 200
    await asyncio.gather(*full.requests)
    assert full.order == ["flood", "urgent", "normal", "flood", "flood", "flood"]


async def test_tenants_of_a_class_take_turns_and_deadlines_order_each(full: GatewayAndPeers) -> None:
    for timeout_ms in (600_000, 500_000, 400_000, 300_000):
        await full.send("a", timeout_ms)
    for timeout_ms in (200_000, 100_000):
        await full.send("b", timeout_ms)
    full.peers.prefill.hold.set()
    await asyncio.gather(*full.requests)
    assert full.order[1:] in (["b", "a", "b", "a", "a"], ["a", "b", "a", "b", "a"])
    for tenant in "ab":
        left = [spec.timeout_ms for spec in full.peers.decode.seen[1:] if spec.tenant == tenant]
        assert left == sorted(left)


async def test_each_choice_of_a_request_waits_for_its_own_turn(full: GatewayAndPeers) -> None:
    full.peers.prefill.hold.set()
    answer = await (await full.send(n=5))
    assert len(answer.json()["choices"]) == 5
    assert len(full.peers.decode.seen) == 5


async def test_free_capacity_lets_everything_in(gateway: Gateway, http: httpx.AsyncClient, peers: Peers) -> None:
    """The peers hold 64 blocks of 16 tokens."""
    peers.prefill.hold.clear()
    requests = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(64 * 16 // COST)]
    await eventually(lambda: len(peers.prefill.running) == len(requests))
    assert gateway.directory.llm_of(None).admission.admitted.tokens == len(requests) * COST
    peers.prefill.hold.set()
    assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
    await everything_free(peers, gateway)


# --- ends ---


async def test_a_full_line_refuses_the_one_that_fills_it(full: GatewayAndPeers) -> None:
    flood = [await full.send("flood") for _ in range(8)]
    refused = await flood[-1]
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-tandem-path"] == "none"
    full.requests.append(other := asyncio.create_task(full.http.post("/v1/completions", json=BODY)))
    assert (await flood[-2]).status_code == 429
    assert not other.done()
    with pytest.raises(aio.AioRpcError) as exhausted:
        await full.service.GenerateUnary(grpc_request(tenant="flood"))
    assert exhausted.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(exhausted.value.trailing_metadata() or ())["retry-after"] == "1"


def grpc_request(**other: Any) -> llm_pb2.GenerateUnaryRequest:
    sampling = llm_pb2.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    asked = llm_pb2.GenerateRequest(model=MODEL, prompt="x", sampling=sampling, **other)
    return llm_pb2.GenerateUnaryRequest(generate=asked)


async def test_the_deadline_passes_in_the_line(full: GatewayAndPeers) -> None:
    await full.send()
    late = await (await full.send(timeout_ms=1500))
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "queue_timeout"
    with pytest.raises(aio.AioRpcError) as exceeded:
        await full.service.GenerateUnary(grpc_request(), timeout=0.1)
    assert exceeded.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: full.waiting == 0)


async def test_one_that_leaves_the_line_is_gone_at_once(full: GatewayAndPeers) -> None:
    await full.send()
    waits = await full.send()
    call = full.service.GenerateUnary(grpc_request())
    waiting = asyncio.ensure_future(asyncio.wait_for(call, 60))
    await eventually(lambda: full.waiting == 2)
    waits.cancel()
    waiting.cancel()
    await eventually(lambda: full.waiting == 0)
    assert len(full.peers.decode.seen) == 1


async def test_the_line_moves_while_redis_is_silent(
    model_folder: Path, peers: Peers, registry_wait: Callable[[float], None]
) -> None:
    registry_wait(0.5)
    with RedisServer.start() as own:
        async with cluster_of(model_folder, own, peers, max_admitted_tokens=COST) as cluster:
            for _ in range(3):
                await cluster.send()
            own.pause()
            try:
                answers = await asyncio.gather(*cluster.requests)
            finally:
                own.resume()
            assert {answer.status_code for answer in answers} == {200}


async def test_without_workers_the_line_empties_with_an_error(full: GatewayAndPeers) -> None:
    for _ in range(5):
        await full.send()
    await full.peers.workers["d"].die()
    answers = await asyncio.wait_for(asyncio.gather(*full.requests), 60)
    assert {answer.status_code for answer in answers} == {503}
    full.peers.decode.held.clear()  # it is dead


async def test_stopping_ends_those_that_wait(full: GatewayAndPeers) -> None:
    for _ in range(4):
        await full.send()
    stopping = asyncio.create_task(full.gateway._drain())
    answers = await asyncio.gather(*full.requests)
    await stopping
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(503, "stopping")}


# --- what is reported of it ---


async def test_metrics_of_the_line(full: GatewayAndPeers) -> None:
    for _ in range(3):
        await full.send(service_tier="flex")
    await full.send()
    found = metrics_of((await full.http.get("/metrics")).text)
    for kind, count in (("realtime", 0), ("interactive", 1), ("batch", 2)):
        assert found[f'tandem_num_requests_queued{{model_name="{MODEL}",priority_class="{kind}"}}'] == count
    assert found[f'tandem_admitted_tokens{{model_name="{MODEL}"}}'] == COST
    assert found[f'tandem_admitted_requests{{model_name="{MODEL}"}}'] == 1
    assert not [name for name in found if "tenant" in name]


async def test_every_answer_says_which_way_it_went(gateway: Gateway, http: httpx.AsyncClient, peers: Peers) -> None:
    """Whole, streamed and by gRPC alike: in headers or trailers, and in usage."""
    expected = {
        "x-tandem-path": "remote", "x-tandem-prefill-worker": "p", "x-tandem-decode-worker": "d",
        "x-tandem-cached-tokens": "3", "x-tandem-transfer-bytes": "4096", "x-tandem-transport": "tcp",
        "x-tandem-refused-transports": "shm: another host",
    }  # fmt: skip
    body = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 100}
    whole = await http.post("/v1/completions", json=body)
    told = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=told) as streamed:
        lines = [line async for line in streamed.aiter_lines() if line]
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        service: Any = llm_pb2_grpc.LLMServiceStub(channel)
        asked = llm_pb2.GenerateRequest(model=MODEL, prompt="once upon")
        stream, unary = service.Generate(asked), service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked))
        messages = [message async for message in stream]
        await unary
        trailers = [dict(await call.trailing_metadata()) for call in (stream, unary)]
    for headers in (whole.headers, streamed.headers, *trailers):
        assert {name: headers[name] for name in expected} == expected
        assert headers["x-tandem-reason"].startswith("remote prefill: 0 prompt tokens cached there")
    for usage in (whole.json()["usage"], json.loads(lines[-2].removeprefix("data: "))["usage"]):
        (way,) = usage["tandem"]
        assert (way["path"], way["cached_tokens"], way["transfer_bytes"]) == ("remote", 3, 4096)
        assert way["reason"] == whole.headers["x-tandem-reason"]
    assert messages[-1].path.reason == trailers[0]["x-tandem-reason"]


async def test_a_failed_answer_says_how_far_it_came(gateway: Gateway, http: httpx.AsyncClient, peers: Peers) -> None:
    peers.prefill.refuse = grpc.StatusCode.INTERNAL
    answer = await http.post("/v1/completions", json=BODY)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        with pytest.raises(aio.AioRpcError) as failed:
            await llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(grpc_request())
    assert answer.status_code == 500
    for headers in (answer.headers, dict(failed.value.trailing_metadata() or ())):
        assert (headers["x-tandem-path"], headers["x-tandem-decode-worker"]) == ("remote", "d")


async def test_a_second_try_says_why_and_is_counted(http: httpx.AsyncClient, gateway: Gateway, peers: Peers) -> None:
    peers.prefill.refuse = grpc.StatusCode.UNAVAILABLE
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert "after worker p: refused for the test" in answer.headers["x-tandem-reason"]
    found = metrics_of((await http.get("/metrics")).text)
    assert found['tandem_fallbacks_total{path="local",reason="worker_lost"}'] == 1
