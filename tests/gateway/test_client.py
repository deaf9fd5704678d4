"""tandem.client against a gateway: answers, streams that are left, what is repeated and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from typing import Any

import grpc
import pytest

from services.gateway import Gateway
from tandem import rpc
from tandem.client import AsyncClient, Client, field_violations
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers


@pytest.fixture
async def client(gateway: Gateway, peers: Peers) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{gateway.grpc_port}", timeout_s=60) as client:
        yield client


async def test_whole_and_streamed(client: AsyncClient, gateway: Gateway) -> None:
    whole = await client.generate("once upon", max_tokens=6, temperature=0.0, seed=1)
    parts = [part async for part in client.stream("once upon", model=MODEL, max_tokens=6, temperature=0.0, seed=1)]
    assert "".join(part.text for part in parts) == whole.text != ""
    assert parts[-1].usage.completion_tokens == 6

    def plain() -> tuple[str, str]:
        with Client(f"127.0.0.1:{gateway.grpc_port}", timeout_s=60) as client:
            said = [{"role": "user", "content": "once"}]
            streamed = "".join(part.text for part in client.stream(said, max_tokens=4, seed=2))
            return client.generate(said, max_tokens=4, seed=2).text, streamed

    text, streamed = await asyncio.to_thread(plain)
    assert text == streamed != ""


async def test_a_stream_that_is_left_is_cancelled(client: AsyncClient, gateway: Gateway) -> None:
    async with aclosing(client.stream("once upon", max_tokens=200)) as parts:
        await anext(parts)
    await eventually(lambda: not gateway.llm.running)

    def plain() -> None:
        address = f"127.0.0.1:{gateway.grpc_port}"
        with Client(address, timeout_s=60) as client, closing(client.stream("once", max_tokens=200)) as parts:
            next(parts)

    await asyncio.to_thread(plain)
    await eventually(lambda: not gateway.llm.running)


async def test_errors_name_the_field(client: AsyncClient) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await client.generate("x", temperature=9.0)
    assert list(field_violations(refused.value)) == ["temperature"]
    with pytest.raises(grpc.RpcError) as unknown:
        await client.generate("x", model="other")
    assert field_violations(unknown.value) == {}


class Unready(llm_pb2_grpc.LLMServiceServicer):
    """Unavailable for two calls, and again in the middle of a stream."""

    calls = 0

    async def GenerateUnary(self, request: Any, context: Any) -> llm_pb2.GenerateUnaryResponse:
        self.calls += 1
        if self.calls <= 2:
            raise rpc.Refused(grpc.StatusCode.UNAVAILABLE, "not yet")
        return llm_pb2.GenerateUnaryResponse(text="ok")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[llm_pb2.GenerateResponse]:
        self.calls += 1
        yield llm_pb2.GenerateResponse(text="one")
        raise rpc.Refused(grpc.StatusCode.UNAVAILABLE, "gone")


async def test_only_what_has_no_answer_yet_is_repeated() -> None:
    service = Unready()
    servicer = rpc.Servicer("tandem.v1.LLMService", service, llm_pb2_grpc.add_LLMServiceServicer_to_server)
    server = await rpc.serve([servicer], "127.0.0.1", 0)
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}", timeout_s=60) as client:
            assert (await client.generate("x", model="m")).text == "ok"
            assert service.calls == 3
            parts = client.stream("x", model="m")
            assert (await anext(parts)).text == "one"
            with pytest.raises(grpc.RpcError):
                await anext(parts)
            assert service.calls == 4
    finally:
        await server.stop(0)
