"""tandem_client against a gateway: answers, streams that are left, what is repeated and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from threading import Timer
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from tandem_client import (
    AsyncClient,
    Client,
    Retries,
    error_code,
    field_violations,
    new_traceparent,
    retry_after_s,
    trace_id,
)

from services.gateway import Gateway
from tandem import rpc
from tandem.local import free_ports
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
    await eventually(lambda: not gateway.shared.state.running)

    def plain() -> None:
        address = f"127.0.0.1:{gateway.grpc_port}"
        with Client(address, timeout_s=60) as client, closing(client.stream("once", max_tokens=200)) as parts:
            next(parts)

    await asyncio.to_thread(plain)
    await eventually(lambda: not gateway.shared.state.running)


async def test_errors_name_the_field(client: AsyncClient) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await client.generate("x", temperature=9.0)
    assert list(field_violations(refused.value)) == ["temperature"]
    with pytest.raises(grpc.RpcError) as unknown:
        await client.generate("x", model="other")
    assert field_violations(unknown.value) == {}
    assert error_code(unknown.value) == "model_not_found"


class Unready(llm_pb2_grpc.LLMServiceServicer):
    """Unavailable for two calls, and again in the middle of a stream; or full, for as many calls as it is told."""

    calls = 0
    full = 0
    endless = False
    left = 0
    retry_after = "0.1"

    async def GenerateUnary(self, request: Any, context: Any) -> llm_pb2.GenerateUnaryResponse:
        self.calls += 1
        if self.full:
            self.full -= 1
            context.set_trailing_metadata((("retry-after", self.retry_after),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if self.calls <= 2:
            raise rpc.Refused(grpc.StatusCode.UNAVAILABLE, "not yet")
        return llm_pb2.GenerateUnaryResponse(text="ok")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[llm_pb2.GenerateResponse]:
        self.calls += 1
        yield llm_pb2.GenerateResponse(text=dict(context.invocation_metadata()).get("traceparent", "none"))
        try:
            await asyncio.sleep(60 if self.endless else 0)
        finally:
            self.left += 1
        raise rpc.Refused(grpc.StatusCode.UNAVAILABLE, "gone")


@asynccontextmanager
async def serving(service: Unready) -> AsyncIterator[str]:
    servicer = rpc.Servicer("tandem.v1.LLMService", service, llm_pb2_grpc.add_LLMServiceServicer_to_server)
    server = await rpc.serve([servicer], "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def test_only_what_has_no_answer_yet_is_repeated() -> None:
    service = Unready()
    async with serving(service) as address, AsyncClient(address, timeout_s=60) as client:
        assert (await client.generate("x", model="m")).text == "ok"
        assert service.calls == 3
        parts = client.stream("x", model="m")
        assert (await anext(parts)).text == "none"
        with pytest.raises(grpc.RpcError):
            await anext(parts)
        assert service.calls == 4


@pytest.mark.parametrize("plain", [True, False])
async def test_a_full_cluster_says_when_to_ask_again(plain: bool) -> None:
    service = Unready()
    service.calls, service.full = 2, 2

    def ask(address: str, **options: Any) -> str:
        with Client(address, timeout_s=60) as client:
            return client.generate("x", model="m", **options).text

    async def asked(address: str, **options: Any) -> str:
        if plain:
            return await asyncio.to_thread(ask, address, **options)
        async with AsyncClient(address, timeout_s=60) as client:
            return (await client.generate("x", model="m", **options)).text

    async with serving(service) as address:
        assert await asked(address) == "ok"
        assert service.calls == 5
        service.full, service.retry_after = 1, "30"
        with pytest.raises(grpc.RpcError) as late:  # the deadline would be over by then: refused at once
            await asked(address, timeout_s=20)
        assert retry_after_s(late.value) == 30
        assert service.calls == 6


async def test_a_deadline_is_that_of_all_attempts() -> None:
    begun = asyncio.get_running_loop().time()
    async with AsyncClient(f"127.0.0.1:{free_ports(1)[0]}", retries=Retries(most=1000)) as client:
        with pytest.raises(grpc.RpcError):
            await client.generate("x", model="m", timeout_s=1.5)
    assert asyncio.get_running_loop().time() - begun < 10


@pytest.mark.parametrize("plain", [True, False])
async def test_calls_join_a_trace(plain: bool) -> None:
    named = new_traceparent()

    def ask(address: str) -> str:
        with Client(address, timeout_s=60) as client, client.stream("x", model="m", traceparent=named) as parts:
            return next(parts).text

    async with serving(Unready()) as address, AsyncClient(address, timeout_s=60) as client:
        with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
            async with client.stream("x", model="m") as parts:
                assert trace_id((await anext(parts)).text) == f"{span.get_span_context().trace_id:032x}"
        if plain:
            assert await asyncio.to_thread(ask, address) == named
        else:
            async with client.stream("x", model="m", traceparent=named) as parts:
                assert (await anext(parts)).text == named


async def test_another_thread_or_task_cancels() -> None:
    service = Unready()
    service.endless = True

    def plain(address: str) -> grpc.StatusCode:
        with Client(address, timeout_s=60) as client, client.stream("x", model="m") as parts:
            next(parts)
            Timer(0.1, parts.cancel).start()
            with pytest.raises(grpc.RpcError) as cancelled:
                list(parts)
            return cancelled.value.code()

    async with serving(service) as address, AsyncClient(address, timeout_s=60) as client:
        async with client.stream("x", model="m") as parts:
            await anext(parts)
            asyncio.get_running_loop().call_later(0.1, parts.cancel)
            with pytest.raises(asyncio.CancelledError):
                await anext(parts)
        await eventually(lambda: service.left == 1)
        assert await asyncio.to_thread(plain, address) is grpc.StatusCode.CANCELLED
        await eventually(lambda: service.left == 2)
