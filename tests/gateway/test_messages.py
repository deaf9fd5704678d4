"""/v1/messages and its count_tokens, as Anthropic's clients see them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from grpc import StatusCode

from services.gateway.door import pings
from tests.gateway.conftest import TEXT, with_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT

PATH = "/v1/messages?beta=true"
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "And kind."},
        {"role": "user", "content": [{"type": "text", "text": "again"}]},
    ],
    "seed": 0,
    "metadata": {"user_id": "a user of theirs"},
    "context_management": {"edits": []},
}


async def said(http: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, Any]]:
    answer = await http.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def _prompt_tokens(message: dict[str, Any]) -> int:
    usage = message["usage"]
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return int(sum(usage[kind] for kind in kinds))


async def test_a_stream_says_what_the_whole_message_does(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=BODY)
    whole = answer.json()
    assert answer.status_code == 200, whole
    assert answer.headers["request-id"]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "end_turn")
    events = await said(http, BODY)
    assert [name for name, _ in events[:2]] == ["message_start", "content_block_start"]
    assert [name for name, _ in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"] == TEXT
    ended = events[-2][1]
    assert ended["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert _prompt_tokens(events[0][1]["message"]) == _prompt_tokens(whole) > 0


async def test_count_tokens_is_exact(http: httpx.AsyncClient) -> None:
    whole = (await http.post(PATH, json=BODY)).json()
    body = {name: BODY[name] for name in ("model", "system", "messages")}
    counted = await http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": _prompt_tokens(whole)}


async def test_stop_reasons(http: httpx.AsyncClient) -> None:
    short = (await http.post(PATH, json={**BODY, "max_tokens": 2})).json()
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 2)
    stopped = (await http.post(PATH, json={**BODY, "stop_sequences": ["lazy"]})).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lazy")


@pytest.mark.parametrize(
    ("wrong", "status", "kind", "named"),
    [
        ({"model": "another"}, 404, "not_found_error", "another"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        (
            {"tools": [{"name": "web_search", "type": "web_search_20250305"}]},
            400,
            "invalid_request_error",
            "tools[0].type",
        ),
        ({"tools": [{"name": "x", "type": "bash_x"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, 400, "invalid_request_error", "tool_use"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking.budget_tokens"),
        (
            {"thinking": {"type": "adaptive", "budget_tokens": 5}},
            400,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
        ({"thinking": {"type": "on"}}, 400, "invalid_request_error", "thinking.type"),
        ({"output_config": {"effort": 3}}, 400, "invalid_request_error", "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, 400, "invalid_request_error", "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
            400,
            "invalid_request_error",
            "output_config.format.schema",
        ),
        ({"thread": {"type": "create"}}, 400, "invalid_request_error", "thread"),
        ({"compaction": {"type": "auto"}}, 400, "invalid_request_error", "compaction"),
        ({"context_management": []}, 400, "invalid_request_error", "context_management"),
        ({"max_tokens": 10**30}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [{"role": "system", "content": "Be."}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "assistant", "content": " "}]}, 400, "invalid_request_error", "messages"),
    ],
)
async def test_errors_are_anthropics(
    http: httpx.AsyncClient, wrong: dict[str, Any], status: int, kind: str, named: str
) -> None:
    answer = await http.post(PATH, json={**BODY, **wrong})
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind)
    assert named in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b"[]", 400, "invalid_request_error"),
        ("POST", PATH, b"x" * (2**20 + 1), 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", b"x" * (2**20 + 1), 413, "request_too_large"),
    ],
)
@with_settings(max_body_bytes=2**20)
async def test_so_are_those_of_every_path(
    http: httpx.AsyncClient, method: str, path: str, body: bytes, status: int, kind: str
) -> None:
    answer = await http.request(method, path, content=body, headers={"x-request-id": "a"})
    found = answer.json()
    assert (answer.status_code, found["error"]["type"]) == (status, kind)
    assert found["request_id"] == answer.headers["request-id"] == "a"


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (StatusCode.RESOURCE_EXHAUSTED, 529, "overloaded_error"),
        (StatusCode.INTERNAL, 500, "api_error"),
        (StatusCode.UNAVAILABLE, 503, "api_error"),
        (StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    ],
)
async def test_so_are_those_of_the_cluster(
    http: httpx.AsyncClient, peers: Peers, refusal: StatusCode, status: int, kind: str
) -> None:
    peers.decode.refuse = refusal
    answer = await http.post(PATH, json=BODY, headers={"x-request-timeout": "3"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) is (status == 529)


async def test_a_stream_that_fails_ends_with_an_error(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.decode.step_s = 0.01
    body = {**BODY, "stream": True, "seed": 0}
    async with http.stream("POST", PATH, json=body) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: message_start"
        peers.decode.fail("INTERNAL")
        rest = [line async for line in lines if line]
    assert rest[-2] == "event: error"
    said = json.loads(rest[-1].removeprefix("data: "))
    assert (said["type"], said["error"]["type"]) == ("error", "api_error")
    assert said["request_id"] == answer.headers["request-id"]


async def test_a_silent_stream_says_that_it_lives(
    http: httpx.AsyncClient, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pings, "HEAD_S", 0.01)
    monkeypatch.setattr(pings, "PING_S", 0.01)
    peers.decode.step_s = 0.2
    events = await said(http, {**BODY, "max_tokens": 4})
    kinds = [name for name, _ in events]
    assert kinds.count("ping") > 3
    others = [kind for kind in kinds if kind != "ping"]
    assert (others[0], others[-1], kinds[-1]) == ("message_start", "message_stop", "message_stop")
    peers.decode.step_s = 0.0
    answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert "ping" not in answer.text


async def test_large_bodies_are_read_in_the_helper(http: httpx.AsyncClient) -> None:
    filler = {"text": "x" * 300_000, "type": "thinking", "thinking": "", "signature": ""}
    earlier = {"role": "assistant", "content": [filler, {"type": "text", "text": "Hi"}]}
    body = {**BODY, "messages": [BODY["messages"][0], earlier, BODY["messages"][2]]}
    answer = await http.post(PATH, json=body)
    assert (answer.status_code, answer.json()["type"]) == (200, "message")
