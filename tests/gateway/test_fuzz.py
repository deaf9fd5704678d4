"""Anything at all at the public doors: every answer is the client's fault or a success, and the gateway lives on."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
from grpc import aio
from hypothesis import strategies as st

from services.gateway import Gateway
from tandem.v1 import llm_pb2
from tests.fuzzing import collected
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL

FIELDS = (
    "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "stop", "seed",
    "user", "temperature", "top_p", "top_k", "logprobs", "logit_bias", "cache_salt", "priority", "service_tier",
    "echo", "tools", "input", "instructions", "text", "reasoning", "metadata", "include", "tool_choice",
    "max_output_tokens",
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).map(
        lambda said: json.dumps({"model": MODEL, "prompt": "x", "input": "x", "max_tokens": 2, **said}).encode()
    ),
    st.binary(max_size=200),
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
METHODS = {"Generate": True, "GenerateUnary": False, "ListModels": False}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good request, some bytes of which are others."""
    sampling = llm_pb2.SamplingParams(max_tokens=2, stop=["x"], logit_bias={3: 1.0})
    good = llm_pb2.GenerateRequest(model=MODEL, prompt="once", sampling=sampling, tenant="t").SerializeToString()
    data = bytearray(good)
    for at, byte in draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4)):
        data[at] = byte
    return bytes(data)


async def test_bodies_of_http(gateway: Gateway, http: httpx.AsyncClient) -> None:
    seen: list[tuple[int, bytes]] = []
    bodies = collected(BODIES)
    for number, body in enumerate(bodies):
        answer = await http.post(PATHS[number % len(PATHS)], content=body, headers={"x-request-timeout-ms": "30000"})
        seen.append((answer.status_code, body))
    assert [body for status, body in seen if status >= 500] == []
    assert {status for status, _ in seen} >= {200, 400}
    await eventually(lambda: gateway.llm.readiness()[0])


async def test_messages_of_grpc(gateway: Gateway) -> None:
    allowed = {
        grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }  # fmt: skip
    wrong = []
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        for data in collected(damaged() | st.binary(max_size=100)):
            for method, streams in METHODS.items():
                name = f"/tandem.v1.LLMService/{method}"
                call: Any = (channel.unary_stream if streams else channel.unary_unary)(name, None, None)(
                    data, timeout=30.0
                )
                try:
                    while streams and await call.read() is not aio.EOF:
                        pass
                    await (call.code() if streams else call)
                except aio.AioRpcError:
                    pass
                if await call.code() not in allowed:
                    wrong.append((method, data, await call.code()))
    assert wrong == []
