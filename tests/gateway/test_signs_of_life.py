"""A stream whose prompt waits has a head within a second, and something to read every so often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from grpc import StatusCode, aio
from openai import APIError, AsyncOpenAI

from services.gateway import Gateway
from services.gateway.door import pings
from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import OTHER, TEXT, eventually, joined, leave, with_settings
from tests.gateway.peers import MODEL, Peers

MESSAGES = [{"role": "user", "content": "tell me"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 0, "stream": True}
STREAMS = {
    "chat/completions": CHAT,
    "completions": {"model": MODEL, "prompt": "once upon", "seed": 0, "stream": True, "max_tokens": 100},
    "responses": {"model": MODEL, "input": "tell me", "seed": 0, "stream": True},
    "messages": CHAT | {"max_tokens": 100},
}
WAITING = {"responses": "event: response.created", "messages": "event: ping"}
ENDED = {"messages": "event: message_stop"}
FAILED = {"responses": "event: response.failed", "messages": "event: error"}
EACH = pytest.mark.parametrize("path", STREAMS)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S", "BEGIN_S", "PING_S"):
        monkeypatch.setattr(pings, name, 0.02)


async def lines_of(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line:
            yield line


@EACH
async def test_a_stream_that_waits_has_a_head_and_signs_of_life(
    http: httpx.AsyncClient, peers: Peers, soon: None, path: str
) -> None:
    peers.prefill.hold.clear()
    async with http.stream("POST", f"/v1/{path}", json=STREAMS[path]) as answer:
        assert answer.status_code == 200
        assert answer.headers["request-id" if path == "messages" else "x-request-id"]
        assert not [name for name in answer.headers if name.startswith("x-tandem")], "nothing of it is known yet"
        lines = lines_of(answer)
        assert await anext(lines) == WAITING.get(path, ": waiting")
        sign = "event: ping" if path == "messages" else ": waiting"
        signs = 0
        while signs < 3:
            signs += await anext(lines) == sign
        peers.prefill.hold.set()
        rest = [line async for line in lines]
    assert rest[-1] == "data: [DONE]" or ENDED[path] in rest


@EACH
async def test_a_failure_after_the_head_is_the_streams_last_event(
    http: httpx.AsyncClient, peers: Peers, soon: None, path: str
) -> None:
    peers.prefill.hold.clear()
    peers.prefill.refuse = StatusCode.INVALID_ARGUMENT
    async with http.stream("POST", f"/v1/{path}", json=STREAMS[path]) as answer:
        lines = lines_of(answer)
        assert await anext(lines) == WAITING.get(path, ": waiting")
        peers.prefill.hold.set()
        rest = [line async for line in lines]
    assert "[DONE]" not in rest[-1]
    assert "refused for the test" in rest[-1]
    if path in FAILED:
        assert rest[-2] == FAILED[path]
    else:
        assert rest[-1].startswith('data: {"error":')


@EACH
async def test_a_failure_before_the_head_has_a_status(
    http: httpx.AsyncClient, peers: Peers, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(pings, "BEGIN_S", 60.0)
    peers.prefill.refuse = peers.decode.refuse = StatusCode.INVALID_ARGUMENT
    answer = await http.post(f"/v1/{path}", json=STREAMS[path])
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")


async def test_official_clients_read_such_a_stream(http: httpx.AsyncClient, peers: Peers, soon: None) -> None:
    """Each has its stream as soon as that has a head."""
    peers.prefill.hold.clear()
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as openai:
        stream = await openai.chat.completions.create(**CHAT)
        peers.prefill.hold.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        peers.prefill.hold.clear()
        peers.prefill.refuse = StatusCode.INVALID_ARGUMENT
        stream = await openai.chat.completions.create(**CHAT)
        peers.prefill.hold.set()
        with pytest.raises(APIError, match="refused for the test"):
            await anext(aiter(stream))
    peers.prefill.hold.clear()
    peers.prefill.refuse = None
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "extra_body": {"seed": 0}}
    async with AsyncAnthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as anthropic:
        async with anthropic.messages.stream(**asked) as told:
            peers.prefill.hold.set()
            message = await told.get_final_message()
        assert message.content[0].type == "text"
        assert message.content[0].text == TEXT


@pytest.mark.usefixtures("patient")
@with_settings(aliases={"fast": {OTHER: 1, MODEL: "fallback"}})
async def test_a_head_alone_leaves_the_answer_to_a_fallback(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, soon: None
) -> None:
    await joined(gateway)
    await leave(others, "other-p")
    others.workers["other-d"].servicer.step_s = 60.0
    body = CHAT | {"model": "fast", "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = lines_of(answer)
        assert await anext(lines) == ": waiting"
        await eventually(lambda: any(one.running for one in gateway.directory.llm_of(OTHER).pool.connections))
        await leave(others, "other-d")
        rest = [line async for line in lines]
    assert rest[-1] == "data: [DONE]"
    assert f'"model":"{MODEL}","model_reason":"fallback of fast' in rest[-2]


async def test_a_grpc_stream_that_waits_has_its_first_metadata(gateway: Gateway, peers: Peers, soon: None) -> None:
    peers.prefill.hold.clear()
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        call = stub.Generate(llm_pb2.GenerateRequest(model=MODEL, prompt="once upon", sampling={"seed": 0}))
        async with asyncio.timeout(20.0):
            await call.initial_metadata()
        assert not call.done()
        peers.prefill.hold.set()
        assert "".join([message.text async for message in call]) == TEXT
        peers.prefill.hold.clear()
        peers.prefill.refuse = StatusCode.INVALID_ARGUMENT
        call = stub.Generate(llm_pb2.GenerateRequest(model=MODEL, prompt="once upon"))
        await call.initial_metadata()
        peers.prefill.hold.set()
        with pytest.raises(aio.AioRpcError, match="refused for the test"):
            await anext(aiter(call))
