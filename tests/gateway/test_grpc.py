"""Answers over gRPC: the same pipeline behind the other door."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway import Gateway
from services.gateway.text import Tokenizer
from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import TEXT, eventually, with_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_failures import everything_free

Sampling = llm_pb2.SamplingParams


@pytest.fixture
async def channel(gateway: Gateway) -> AsyncIterator[aio.Channel]:
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield channel


@pytest.fixture
def service(channel: aio.Channel) -> Any:
    return llm_pb2_grpc.LLMServiceStub(channel)


def request(**other: Any) -> llm_pb2.GenerateRequest:
    return llm_pb2.GenerateRequest(**{"model": MODEL, "prompt": "once upon", "sampling": Sampling(seed=0), **other})


def long_request() -> llm_pb2.GenerateRequest:
    return request(sampling=Sampling(seed=0, max_tokens=200, ignore_eos=True))


async def test_stream_and_unary_agree(service: Any, tokenizer: Tokenizer) -> None:
    messages = [message async for message in service.Generate(request(request_id="mine"))]
    whole = await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request(request_id="mine")))
    assert "".join(message.text for message in messages) == whole.text == TEXT
    assert [i for message in messages for i in message.token_ids] == list(whole.token_ids)
    assert tokenizer.decode(whole.token_ids) == TEXT
    last = messages[-1]
    assert last.finish_reason == whole.finish_reason == llm_pb2.FINISH_REASON_STOP
    assert last.usage == whole.usage
    assert whole.usage.completion_tokens == len(whole.token_ids)
    assert whole.usage.cached_tokens == 3
    assert last.path == whole.path
    assert (whole.path.kind, whole.path.transport) == (llm_pb2.Path.KIND_REMOTE_PREFILL, "tcp")
    assert (whole.path.prefill_worker, whole.path.decode_worker) == ("p", "d")
    assert not any(message.HasField("usage") for message in messages[:-1])
    assert whole.request_id == "mine"


async def test_messages_priorities_and_tenants(service: Any, peers: Peers, tokenizer: Tokenizer) -> None:
    asked = llm_pb2.GenerateRequest(
        model=MODEL, messages=llm_pb2.ChatMessages(messages=[
            {"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"},
        ]),
        priority=llm_pb2.PRIORITY_BATCH, tenant="acme", cache_salt="s",
    )  # fmt: skip
    await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked))
    spec = peers.decode.seen[0]
    assert tokenizer.decode(spec.token_ids) == "<s><system>be brief\n<user>hi\n<assistant>"
    assert (spec.priority, spec.tenant, spec.cache_salt) == (100, "acme", "s")


async def test_logprobs(service: Any) -> None:
    asked = request(sampling=Sampling(seed=0, max_tokens=3, logprobs=2))
    whole = await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked))
    assert [one.token_id for one in whole.logprobs] == list(whole.token_ids)
    assert all(len(one.top) == 2 for one in whole.logprobs)


async def test_cancelling_frees_everything(service: Any, peers: Peers, gateway: Gateway) -> None:
    peers.decode.step_s = 0.01
    call = service.Generate(long_request())
    await call.read()
    call.cancel()
    await everything_free(peers, gateway)
    assert peers.decode.aborted == [peers.decode.seen[0].request_id]


async def test_cancelling_in_prefill_frees_everything(service: Any, peers: Peers, gateway: Gateway) -> None:
    peers.prefill.hold.clear()
    call = service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request()))
    waiting = asyncio.ensure_future(asyncio.wait_for(call, 60))
    await eventually(lambda: bool(peers.prefill.running))
    call.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await everything_free(peers, gateway)
    assert len(peers.prefill.cancelled) == 1


async def test_the_deadline(service: Any, peers: Peers, gateway: Gateway) -> None:
    for timeout_s in (0.4, 2.0, 10.0):  # the longer ones where this machine stood still before it came to a worker
        peers.decode.step_s = timeout_s / 20
        with pytest.raises(aio.AioRpcError) as late:
            await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=long_request()), timeout=timeout_s)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await everything_free(peers, gateway)
        if peers.decode.seen:
            break
    assert peers.decode.seen[0].timeout_ms <= 1000 * timeout_s


async def test_decode_dies_mid_stream(service: Any, peers: Peers) -> None:
    peers.decode.step_s = 0.01
    messages = aiter(service.Generate(long_request()))
    await anext(messages)
    await peers.workers["d"].die()
    with pytest.raises(aio.AioRpcError) as lost:
        await read_all(messages)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "worker d" in (lost.value.details() or "")


async def read_all(messages: AsyncIterator[Any]) -> None:
    async for _ in messages:
        continue


CLIENT = """
import sys, grpc
from tandem.v1 import llm_pb2, llm_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = llm_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
    for message in llm_pb2_grpc.LLMServiceStub(channel).Generate(request):
        print(len(message.token_ids), flush=True)
"""


async def test_a_client_that_stands_still_for_a_moment_loses_nothing(gateway: Gateway, peers: Peers) -> None:
    peers.decode.step_s = 0.02
    arguments = "-c", CLIENT, f"127.0.0.1:{gateway.grpc_port}", long_request().SerializeToString().hex()
    client = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert client.stdout is not None
        first = int(await client.stdout.readline())
        client.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)  # well over what workers and gateways grant each other
        client.send_signal(signal.SIGCONT)
        others = await client.stdout.read()
        assert first + sum(map(int, others.split())) == 200
        assert await client.wait() == 0
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()


async def test_health_follows_readiness(channel: aio.Channel, peers: Peers) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="tandem.v1.LLMService")

    async def serving() -> bool:
        answer = await health.Check(request, timeout=30)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    await eventually(serving)
    await peers.workers["d"].die()

    async def not_serving() -> bool:
        return not await serving()

    await eventually(not_serving)


@with_settings(timeout_s=3.0)
async def test_a_client_that_does_not_read(gateway: Gateway, peers: Peers) -> None:
    """It names no deadline, at which gRPC would end the call, so the gateway's deadline ends it."""
    peers.decode.step_s = 0
    asked = request(sampling=Sampling(seed=0, max_tokens=200, ignore_eos=True), n=8)
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options=small) as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        call = stub.Generate(asked)
        await call.read()
        (answer,) = gateway.shared.state.running
        await eventually(lambda: not gateway.shared.state.running)
        await everything_free(peers, gateway)
        assert asyncio.get_running_loop().time() > answer.request.deadline  # it was not all written
        call.cancel()
