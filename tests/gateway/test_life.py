"""The gateway as a process: what it tells of itself, how it ends, what it weighs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import psutil
import pytest
from grpc import ChannelConnectivity

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.generation import Answer
from tandem.commands.doctor import DoctorSettings, examine
from tandem.local import free_ports
from tests.gateway.conftest import TEXT, eventually
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_failures import received

LONG = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 200, "ignore_eos": True}
BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "cupy", "ray", "transformers", "numpy"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
import services.gateway.__main__
"""


def test_the_room_imports_without_torch() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED], check=True, timeout=60)


async def test_readiness_counts_what_is_there(http: httpx.AsyncClient) -> None:
    answer = await http.get("/health/ready")
    assert answer.status_code == 200
    counts = {"prefill_workers": 1, "decode_workers": 1, "linked_pairs": 1, "sequences": 64, "kv_tokens": 1024}
    assert answer.json() == {
        "ready": True, "missing": [], **counts, "refused_workers": [], "registry_reached": True,
        "models": {MODEL: {"ready": True, **counts}},
    }  # fmt: skip


async def test_models(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 256)]


async def test_a_decode_worker_hears_what_was_passed_on(http: httpx.AsyncClient, peers: Peers) -> None:
    await http.post("/v1/completions", json={**LONG, "max_tokens": 20})
    await eventually(lambda: 0 < peers.decode.num_sent == peers.decode.num_passed_on)


async def test_metrics(http: httpx.AsyncClient, peers: Peers, gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "seed": 0, "max_tokens": 100}
    tokens = (await http.post("/v1/completions", json={**body, "n": 2})).json()["usage"]["completion_tokens"]
    await http.post("/v1/completions", json={**body, "n": 0})
    peers.decode.step_s = 0.05
    running = asyncio.create_task(http.post("/v1/completions", json=LONG, headers={"x-request-timeout-ms": "3000"}))
    await eventually(lambda: received(gateway) > 0)
    during = metrics_of((await http.get("/metrics")).text)
    assert during['vllm:num_requests_running{model_name="tiny"}'] == 1
    await running
    after = metrics_of((await http.get("/metrics")).text)
    expected = {
        'vllm:num_requests_running{model_name="tiny"}': 0,
        'vllm:num_requests_waiting{model_name="tiny"}': 0,
        'vllm:prompt_tokens_total{model_name="tiny"}': 6,
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"}': 2,
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"}': 2,
        'vllm:time_to_first_token_seconds_count{model_name="tiny"}': 3,
        'tandem_requests_total{path="remote",status="200"}': 1,
        'tandem_requests_total{path="remote",status="504"}': 1,
        'tandem_requests_total{path="none",status="400"}': 1,
        'tandem_kv_transfer_bytes_total{transport="tcp"}': 3 * 4096,
    }
    assert {name: after[name] for name in expected} == expected
    assert after['vllm:generation_tokens_total{model_name="tiny"}'] > tokens


async def test_fallbacks_are_counted_by_reason(http: httpx.AsyncClient, peers: Peers) -> None:
    await peers.registry.leases.deregister("p", peers.workers["p"].info.incarnation)
    peers.workers["p"].heartbeat.cancel()
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    found = metrics_of((await http.get("/metrics")).text)
    assert found['tandem_fallbacks_total{path="local",reason="no_live_worker"}'] == 1


def metrics_of(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_ending_lets_short_requests_end(settings: GatewaySettings, peers: Peers) -> None:
    peers.decode.step_s = 0.01
    body = {"model": MODEL, "prompt": "x", "seed": 0, "max_tokens": 100}
    async with running(settings.model_copy(update={"drain_s": 50.0})) as (gateway, http):
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: bool(peers.decode.held))
        await gateway.__aexit__(None, None, None)
        answer = await request
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == TEXT


async def test_connections_are_told_to_go_before_none_is_taken(
    settings: GatewaySettings, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.server.CLOSING_S", 5.0)
    peers.decode.step_s = 0.01
    body = {"model": MODEL, "prompt": "x", "seed": 0, "max_tokens": 100}
    async with running(settings.model_copy(update={"drain_s": 50.0})) as (gateway, http):
        assert "connection" not in (await http.post("/v1/completions", json=body)).headers
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            await channel.channel_ready()
            ending = asyncio.create_task(gateway.__aexit__(None, None, None))
            await channel.wait_for_state_change(ChannelConnectivity.READY)  # GOAWAY
        last = await http.post("/v1/completions", json=body)
        assert (last.status_code, last.headers["connection"]) == (200, "close")
        await ending
        with pytest.raises(httpx.ConnectError):
            await http.post("/v1/completions", json=body)


async def test_ending_is_bounded_and_typed(settings: GatewaySettings, peers: Peers) -> None:
    """A stream that goes on past `drain_s` ends with an error event; what it held is released."""
    peers.decode.step_s = 0.05
    parts: list[str] = []

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line:
                    parts.append(line.removeprefix("data: "))

    async with running(settings) as (gateway, http):
        reading = asyncio.create_task(read(http))
        await eventually(lambda: len(parts) > 1)
        await gateway.__aexit__(None, None, None)
        await reading
        gc.collect()
        assert not any(type(one) is Answer for one in gc.get_objects())
    assert json.loads(parts[-1])["error"]["code"] == "stopping"
    assert not peers.decode.held
    assert await peers.reserved() == 0


@asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that the test ends itself."""
    gateway = await make_gateway(settings).__aenter__()
    await eventually(lambda: gateway.readiness()[0])
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http:
        yield gateway, http


@pytest.fixture
async def process(settings: GatewaySettings, peers: Peers) -> AsyncIterator[subprocess.Popen[bytes]]:
    """`python -m services.gateway`, ready."""
    options = [
        f"--redis-url={settings.redis_url}",
        f"--namespace={settings.namespace}", "--host=127.0.0.1", f"--http-port={settings.http_port}", "--grpc-port=0",
    ]  # fmt: skip
    command = [sys.executable, "-m", "services.gateway", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:  # noqa: ASYNC220 - starts at once
        async with httpx.AsyncClient() as http:

            async def ready() -> bool:
                try:
                    return (await http.get(f"http://127.0.0.1:{settings.http_port}/health/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(ready, 60.0)
        yield process
        process.kill()


async def test_the_process_serves_is_lean_and_stops(
    process: subprocess.Popen[bytes], settings: GatewaySettings, peers: Peers
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http:
        answers = [
            await http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "seed": 0, "max_tokens": 100})
            for _ in range(10)
        ]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [TEXT] * 10
    assert psutil.Process(process.pid).memory_info().rss < 250 * 2**20
    os.kill(process.pid, signal.SIGTERM)
    await eventually(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()


async def test_what_a_killed_gateway_had_reserved_is_released(
    process: subprocess.Popen[bytes], settings: GatewaySettings, peers: Peers
) -> None:
    peers.decode.step_s = 0.05
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http:
        requests = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(3)]
        await eventually(lambda: len(peers.decode.held) == 3)
        assert await peers.reserved() > 0

        async def announced() -> bool:
            return [address.model for address in await peers.registry.gateways.live()] == [MODEL]

        await eventually(announced)
        (address,) = await peers.registry.gateways.live()
        assert (address.model, address.http) == (MODEL, f"127.0.0.1:{settings.http_port}")
        process.kill()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert not any(isinstance(end, httpx.Response) for end in ends)

    async def released() -> bool:
        return await peers.reserved() == 0

    await eventually(released)
    assert await peers.registry.gateways.live() == []


async def test_the_doctor_asks_every_gateway_also_where_they_share_ports(
    settings: GatewaySettings, peers: Peers
) -> None:
    grpc, *own = free_ports(3)
    shared = settings.model_copy(update={"grpc_port": grpc})
    one, other = (make_gateway(shared.model_copy(update={"own_http_port": port})) for port in own)
    async with one, other:
        await eventually(lambda: other.readiness()[0])

        async def announced() -> bool:
            return len(await peers.registry.gateways.live()) == 2

        await eventually(announced)
        other.directory.llm_of(None).pool.connections[0].stream.attach("lost")
        asked = DoctorSettings(
            redis_url=settings.redis_url, namespace=settings.namespace, integrity=True, timeout_s=30.0
        )
        whole = {finding.what: finding.good for finding in await examine(asked)}
    said = [whole[f"gateway 127.0.0.1:{port}, integrity"] for port in own]
    assert said == [True, False]


async def test_a_port_that_is_taken(settings: GatewaySettings, peers: Peers, gateway: Gateway) -> None:
    with pytest.raises(OSError, match="in use"):
        await make_gateway(settings).__aenter__()


async def test_a_port_that_it_chooses_is_announced(settings: GatewaySettings, peers: Peers) -> None:
    settings = settings.model_copy(update={"http_port": 0})
    async with make_gateway(settings) as one, make_gateway(settings) as other:
        assert 0 < one.http_port != other.http_port > 0
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{one.http_port}", timeout=60) as http:
            assert (await http.get("/health")).status_code == 200

        async def announced() -> bool:
            found = {address.http for address in await peers.registry.gateways.live()}
            return found == {f"127.0.0.1:{gateway.http_port}" for gateway in (one, other)}

        await eventually(announced)


@pytest.mark.parametrize(
    ("http", "grpc", "own", "words"),
    [
        (9000, 0, 9001, "grpc-port: 0 chooses"),
        (0, 9002, 9001, "http-port: 0 chooses"),
        (9000, 1, 9000, "own-http-port: 9000"),
    ],
)
def test_ports_that_cannot_be_shared_are_named(
    settings: GatewaySettings, http: int, grpc: int, own: int, words: str
) -> None:
    said = settings.model_dump() | {"http_port": http, "grpc_port": grpc, "own_http_port": own}
    with pytest.raises(ValueError, match=words):
        GatewaySettings.model_validate(said)
