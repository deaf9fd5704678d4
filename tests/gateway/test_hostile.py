"""Input that no client of ours would send."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from tandem.v1 import llm_pb2
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
# Bytes that come one by one, for much longer than is waited for them here.
BOUND_S, DRIP_S, DRIPS = 30.0, 0.1, 900


@pytest.fixture
def settings(settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    monkeypatch.setattr("services.gateway.__main__.HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("services.gateway.door.exchange.BODY_TIMEOUT_S", 0.5)
    return settings.model_copy(update={"max_body_bytes": 1 << 20})


async def sent(gateway: Gateway, data: bytes, drip: bytes = b"") -> bytes:
    """Sends bytes; returns what the server answers until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.http_port)

    async def write() -> None:
        writer.write(data)
        for byte in drip:
            await asyncio.sleep(DRIP_S)
            writer.write(bytes([byte]))

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(BOUND_S):
            return await reader.read()
    finally:
        writing.cancel()
        writer.close()


@pytest.mark.parametrize("drip", [b"", b"x" * DRIPS])
@pytest.mark.parametrize("data", [b"", b"PO", HEAD, HEAD + b"x: ", b"PRI * HTTP/2"])
async def test_slow_headers_are_not_waited_for(gateway: Gateway, data: bytes, drip: bytes) -> None:
    answer = await sent(gateway, data, drip)
    assert b" 200 " not in answer


async def test_slow_bodies_are_not_waited_for(gateway: Gateway) -> None:
    answer = await sent(gateway, HEAD + b"content-length: 1000\r\n\r\n{", drip=b" " * DRIPS)
    assert b" 408 " in answer
    assert b'"code":"body_timeout"' in answer


@pytest.mark.parametrize("chunk", [b"ZZ\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"-1\r\n\r\n", b"fffffffffffffffff\r\n"])
async def test_malformed_chunks_are_the_clients_fault(gateway: Gateway, http: httpx.AsyncClient, chunk: bytes) -> None:
    answer = await sent(gateway, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk)
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert (await http.get("/health")).status_code == 200


async def called(gateway: Gateway, method: str, data: bytes) -> grpc.StatusCode:
    """The status that these bytes get from a method, whatever its kind."""
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        name = f"/tandem.v1.LLMService/{method}"
        call: Any = (channel.unary_stream if method == "Generate" else channel.unary_unary)(name, None, None)(
            data, timeout=60.0
        )
        try:
            await (call.read() if method == "Generate" else call)
        except aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary", "ListModels"])
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05x", b"\x0a\x02\xff\xfe", b"\x00" * 9])
async def test_malformed_messages_are_the_clients_fault(gateway: Gateway, method: str, data: bytes) -> None:
    assert await called(gateway, method, data) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK)
    assert await called(gateway, method, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_no_pool_could_hold_is_refused_at_once(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers
) -> None:
    await peers.workers["d"].die()
    await peers.registry.leases.deregister("d", peers.workers.pop("d").info.incarnation)
    await peers.add_decode(num_blocks=4)
    await eventually(lambda: gateway.directory.llm_of(None).max_model_len == 64)
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": [5] * 10, "max_tokens": 60})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_message_has_a_bound(gateway: Gateway, http: httpx.AsyncClient) -> None:
    for size, status in ((1 << 19, grpc.StatusCode.INVALID_ARGUMENT), (2 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED)):
        asked = llm_pb2.GenerateRequest(model=MODEL, prompt="x" * size).SerializeToString()
        assert await called(gateway, "Generate", asked) is status
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * (2 << 20)})
    assert answer.status_code == 413
