"""Anything at all at the public doors: every answer is the client's fault or a success, and the gateway lives on."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from hypothesis import strategies as st

from services.gateway import Gateway
from services.gateway.apis.messages import COUNTED
from services.gateway.errors import InvalidRequest
from tandem.v1 import llm_pb2
from tests.fuzzing import collected
from tests.gateway.conftest import eventually, with_settings
from tests.gateway.full_queue import SMALL, full
from tests.gateway.peers import MODEL
from tests.gateway.tools.test_calls import says

__all__ = ["says"]  # a fixture

FIELDS = (
    "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "stop", "seed",
    "user", "temperature", "top_p", "top_k", "logprobs", "logit_bias", "cache_salt", "priority", "service_tier",
    "echo", "tools", "input", "instructions", "text", "reasoning", "metadata", "include", "tool_choice",
    "max_output_tokens", "parallel_tool_calls", "truncation", "verbosity", "prediction", "reasoning_effort",
    "prompt_cache_retention", "max_tool_calls", "context_management", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from((10**400, -(10**400)))
    | st.floats()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TYPES = (
    "function", "custom", "namespace", "web_search", "mcp", "allowed_tools", "grammar", "message", "reasoning",
    "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "item_reference",
    "web_search_call", "code_interpreter_call", "mcp_call", "mcp_list_tools", "shell_call", "shell_call_output",
    "local_shell_call", "computer_call_output", "compaction",
)  # fmt: skip
# Tools and items of responses, with fields that they have and some that are wrong.
KEYS = ("name", "namespace", "tools", "format", "parameters", "description", "strict", "mode", "call_id", "arguments",
        "input", "output", "role", "content", "id", "function", "custom", "allowed_tools", "grammar", "syntax",
        "definition", "tool_calls", "action", "outputs", "results", "error", "summary")  # fmt: skip
TYPED = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(TYPES), "name": st.sampled_from(("a", "b"))}),
    lambda inner: st.builds(
        lambda one, more: {**one, **more},
        inner,
        st.dictionaries(st.sampled_from(KEYS), VALUES | st.lists(inner, max_size=2)),
    ),
    max_leaves=4,
)
LARKS = st.builds(
    lambda grammar: {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", **grammar}},
    st.fixed_dictionaries(
        {
            "definition": st.sampled_from(("start: /x/", "start: start", "start: (", "", "%ignore"))
            | st.text(max_size=30)
        }
    ),
)
RESPONSES = st.fixed_dictionaries(
    {"model": st.just(MODEL), "input": st.just("x") | st.lists(TYPED, max_size=3), "max_output_tokens": st.just(2)},
    optional={
        "tools": st.lists(TYPED | LARKS, max_size=3),
        "tool_choice": TYPED | VALUES | st.just("required"),
        "stream": st.booleans(),
        "truncation": st.sampled_from(("auto", "disabled")) | VALUES,
    },
).map(lambda said: json.dumps(said).encode())
# What a chat says of tools: each kind below its own name.
CHAT_TOOLS = st.builds(
    lambda kind, inner, more: {"type": kind, kind: inner, **more},
    st.sampled_from(("function", "custom", "allowed_tools")),
    TYPED | LARKS | st.dictionaries(st.sampled_from(KEYS), VALUES | st.lists(TYPED, max_size=2), max_size=4),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=1),
)
CHATS = st.fixed_dictionaries(
    {
        "model": st.just(MODEL),
        "max_tokens": st.just(2),
        "messages": st.lists(
            st.builds(
                lambda role, calls, said: {"role": role, "tool_calls": calls, **said},
                st.sampled_from(("assistant", "assistant", "function")),
                st.lists(CHAT_TOOLS, max_size=2),
                st.dictionaries(
                    st.sampled_from(("content", "function_call", "audio", "refusal")),
                    VALUES | st.just({"name": "f", "arguments": "{}"}) | st.lists(TYPED, max_size=2),
                    max_size=3,
                ),
            )
            | st.just({"role": "user", "content": "x"}),
            min_size=1,
            max_size=3,
        ),
    },
    optional={
        "tools": st.lists(CHAT_TOOLS, max_size=3),
        "tool_choice": CHAT_TOOLS | VALUES | st.sampled_from(("required", "auto")),
        "stream": st.booleans(),
    },
).map(lambda said: json.dumps(said).encode())
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).map(
        lambda said: json.dumps({"model": MODEL, "prompt": "x", "input": "x", "max_tokens": 2, **said}).encode()
    ),
    st.binary(max_size=200),
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
# Fields of Messages and of their blocks, and words that mean something there.
MESSAGE_FIELDS = (
    "messages", "system", "max_tokens", "thinking", "output_config", "output_format", "context_management", "tools",
    "tool_choice", "cache_control", "stop_sequences", "temperature", "top_p", "top_k", "seed", "stream", "metadata",
    "service_tier", "mcp_servers", "container", "thread", "compaction", "structured_outputs", "guided_json",
    "guided_regex",
)  # fmt: skip
NAMES = (
    "type", "text", "content", "role", "name", "id", "input", "tool_use_id", "is_error", "thinking", "signature",
    "budget_tokens", "display", "effort", "format", "schema", "edits", "input_schema", "strict", "defer_loading",
    "eager_input_streaming", "tool_name", "cache_control", "disable_parallel_tool_use", "data", "source", "title",
    "context", "media_type", "url", "stdout",
)  # fmt: skip
WORDS = (
    "text", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking", "image", "document", "user",
    "assistant", "system", "enabled", "disabled", "adaptive", "omitted", "json_schema", "object", "auto", "any", "tool",
    "none", "custom", "tool_search_tool_regex_20251119", "bash_20250124", "text_editor_20250728", "memory_20250818",
    "web_search_20250305", "ephemeral", "f", "low", "updates", "search_result", "server_tool_use",
    "web_search_tool_result", "mcp_tool_result", "container_upload",
)  # fmt: skip
LIKELY = st.recursive(
    st.sampled_from(WORDS) | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
ROLES = st.sampled_from(("user", "assistant", "system"))
BLOCKS = st.dictionaries(st.sampled_from(NAMES), LIKELY, max_size=5).map(
    lambda said: {"type": "text", "text": "x"} | said
)
MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=5) | st.lists(BLOCKS, max_size=3)})
TOOLS = st.dictionaries(st.sampled_from(NAMES), LIKELY, max_size=5).map(
    lambda said: {"name": "f", "input_schema": {}} | said
)
MESSAGES_BODIES = st.tuples(
    st.dictionaries(st.sampled_from(MESSAGE_FIELDS), LIKELY, max_size=4),
    st.fixed_dictionaries({}, optional={
        "messages": st.lists(MESSAGES, min_size=1, max_size=4), "tools": st.lists(TOOLS, max_size=3),
        "thinking": BLOCKS, "output_config": BLOCKS, "tool_choice": BLOCKS, "system": st.lists(BLOCKS, max_size=2),
    }),
).map(
    lambda said: json.dumps(
        {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], **said[0], **said[1]}
    ).encode()
)  # fmt: skip
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


@with_settings(**SMALL)
async def test_bodies_of_http_while_others_wait(gateway: Gateway, http: httpx.AsyncClient) -> None:
    async with full(gateway) as admission:
        statuses = await statuses_of_bodies(http)
    assert statuses >= {400, 429}
    assert admission.check_integrity() == []


async def test_bodies_of_http(gateway: Gateway, http: httpx.AsyncClient) -> None:
    assert await statuses_of_bodies(http) >= {200, 400}
    await eventually(lambda: gateway.readiness()[0])


async def statuses_of_bodies(http: httpx.AsyncClient) -> set[int]:
    """Returns the statuses that any bodies at all get; none is the gateway's fault."""
    seen: list[tuple[int, bytes]] = []
    bodies = collected(BODIES)
    for number, body in enumerate(bodies):
        answer = await http.post(PATHS[number % len(PATHS)], content=body, headers={"x-request-timeout-ms": "30000"})
        seen.append((answer.status_code, body))
    assert [body for status, body in seen if status >= 500] == []
    return {status for status, _ in seen}


@pytest.mark.long
async def test_bodies_of_anthropics_messages(gateway: Gateway, http: httpx.AsyncClient, says: Any) -> None:
    """Each is counted, answered by a model that thinks and calls, and read as the helper reads large ones."""
    says("<think>so</think>ok")
    seen: list[tuple[int, bytes]] = []
    for body in collected(MESSAGES_BODIES, 120):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await http.post(path, content=body, headers={"x-request-timeout-ms": "30000"})
            seen.append((answer.status_code, body))
            said = answer.headers["content-type"].startswith("application/json") and answer.json()
            assert answer.status_code == 200 or said["type"] == "error", body
        with contextlib.suppress(InvalidRequest):
            llm = gateway.directory.llm_of(None)
            COUNTED.reduce(body, llm.bounds, llm.model.chat_template)
    assert [body for status, body in seen if status >= 500] == []
    assert {status for status, _ in seen} >= {200, 400}
    await eventually(lambda: gateway.readiness()[0])


async def test_tools_and_items_of_responses(gateway: Gateway, http: httpx.AsyncClient) -> None:
    seen: list[tuple[int, bytes]] = []
    for body in collected(RESPONSES, 120):
        answer = await http.post("/v1/responses", content=body, headers={"x-request-timeout-ms": "30000"})
        seen.append((answer.status_code, body))
    assert [body for status, body in seen if status not in (200, 400)] == []
    assert {status for status, _ in seen} == {200, 400}
    await eventually(lambda: gateway.readiness()[0])


@pytest.mark.long
async def test_tools_and_calls_of_chats(gateway: Gateway, http: httpx.AsyncClient, says: Any) -> None:
    says('<tool_call>{"name": "a", "arguments": {"input": "x"}}</tool_call>')
    seen: list[tuple[int, bytes]] = []
    for body in collected(CHATS, 120):
        answer = await http.post("/v1/chat/completions", content=body, headers={"x-request-timeout-ms": "30000"})
        seen.append((answer.status_code, body))
        assert answer.status_code == 200 or answer.json()["error"]["param"], body
    assert [body for status, body in seen if status not in (200, 400)] == []
    assert {status for status, _ in seen} == {200, 400}
    await eventually(lambda: gateway.readiness()[0])


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
