"""Tools of /v1/messages: what the template sees of them, and the blocks that a call becomes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from benchmarks.json_schema_suite import takes
from services.gateway.text import Tokenizer
from tests.gateway.peers import MODEL
from tests.gateway.test_messages import said
from tests.gateway.tools.test_calls import CALL, PLACE, prompt_in, says

__all__ = ["says"]  # a fixture
TOOLS = [{"name": "weather", "description": "today's", "input_schema": PLACE}, {"name": "time", "input_schema": {}}]
ASKED: dict[str, Any] = {
    "model": MODEL, "max_tokens": 500, "tools": TOOLS, "messages": [{"role": "user", "content": "hi"}],
}  # fmt: skip
USED = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Lund"}}


async def whole(http: httpx.AsyncClient, **body: Any) -> Any:
    answer = await http.post("/v1/messages", json=ASKED | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_calls_are_the_same_blocks_whole_and_streamed(http: httpx.AsyncClient, says: Any) -> None:
    says(f"Let me look.\n{CALL}\n{CALL}")
    message = await whole(http)
    first, *calls = message["content"]
    assert (message["stop_reason"], first["text"]) == ("tool_use", "Let me look.")
    assert [(one["type"], one["name"], one["input"]) for one in calls] == [
        ("tool_use", "weather", {"city": "Malmö"})
    ] * 2
    assert len({one["id"] for one in calls}) == 2
    assert all(re.fullmatch(r"toolu_\w{9,}", one["id"]) for one in calls)
    assert re.fullmatch(r"msg_\w+", message["id"])
    begun: list[dict[str, Any]] = []
    parts: list[list[str]] = []
    ended = []
    events = await said(http, ASKED)
    for name, data in events:
        if name == "content_block_start":
            begun.append(data["content_block"])
            parts.append([])
            assert data["index"] == len(begun) - 1 == len(ended)
        if name == "content_block_delta":
            assert data["index"] == len(begun) - 1
            parts[-1].append(data["delta"].get("text") or data["delta"].get("partial_json", ""))
        if name == "content_block_stop":
            ended.append(data["index"])
    assert ended == [0, 1, 2]
    assert [one["type"] for one in begun] == ["text", "tool_use", "tool_use"]
    assert [one["input"] for one in begun[1:]] == [{}, {}]
    assert "".join(parts[0]) == "Let me look."
    assert [json.loads("".join(texts)) for texts in parts[1:]] == [{"city": "Malmö"}] * 2
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("before", ["", "Look. "])
async def test_a_call_that_the_model_has_not_ended_is_text(
    http: httpx.AsyncClient, says: Any, before: str, eager: bool
) -> None:
    text = before + CALL.partition("mö")[0]
    says(text)
    tools = [{**TOOLS[0], "eager_input_streaming": eager}]
    message = await whole(http, tools=tools)
    assert (message["stop_reason"], message["content"]) == ("end_turn", [{"type": "text", "text": text}])
    events = [data for name, data in await said(http, {**ASKED, "tools": tools}) if name.startswith("content_block")]
    assert "".join(data["delta"].get("text", "") for data in events if "delta" in data) == text
    began = [data["index"] for data in events if data["type"] == "content_block_start"]
    assert began == [data["index"] for data in events if data["type"] == "content_block_stop"]
    assert began == list(range(len(began)))


async def test_the_template_sees_tools_calls_and_results(
    http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    """And ids as the model's calls have them."""
    seen = says("Fine.")
    text = {"type": "text", "text": "cold"}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_a", "content": [text, text]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no such place", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "so?"},
    ]
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "Look:"}, {**USED, "id": "toolu_a"}]},
        {"role": "user", "content": results},
    ]
    message = await whole(http, messages=history)
    assert (message["stop_reason"], message["content"][0]["text"]) == ("end_turn", "Fine.")
    assert prompt_in(seen, tokenizer) == (
        '[weather][time]<user>hi\n<assistant>Look:weather{"city": "Lund"}\n<tool>cold\ncolda\n'
        "<tool>Error: no such placeb\n<tool>c\n<user>so?\n"
    )
    body = {"model": MODEL, "messages": history, "tools": TOOLS}
    counted = await http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(seen[0].token_ids)}


async def test_choices_of_tools(http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer) -> None:
    seen = says('[{"name": "weather", "arguments": {"city": "A"}}, {"name": "time", "arguments": {}}]')
    message = await whole(http, tool_choice={"type": "any"})
    assert message["stop_reason"] == "tool_use"
    assert [(one["name"], one["input"]) for one in message["content"]] == [("weather", {"city": "A"}), ("time", {})]
    assert "call_1" in seen[0].sampling.grammar
    seen = says('{"city": "A"}')
    message = await whole(http, tool_choice={"type": "tool", "name": "weather"})
    assert message["stop_reason"] == "tool_use"
    assert [(one["name"], one["input"]) for one in message["content"]] == [("weather", {"city": "A"})]
    assert "city" in seen[0].sampling.grammar
    seen = says(f"so: {CALL}{CALL}")
    message = await whole(http, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [one["type"] for one in message["content"]] == ["text", "tool_use"]
    message = await whole(http, tool_choice={"type": "none"})
    assert (message["stop_reason"], message["content"][0]["text"]) == ("end_turn", f"so: {CALL}{CALL}")
    assert prompt_in(seen[-1:], tokenizer) == "<user>hi\n"


async def test_strict_tools_are_held_to_their_schema(http: httpx.AsyncClient, says: Any) -> None:
    seen = says(CALL)
    await whole(http, tools=[{**TOOLS[0], "strict": True}])
    await whole(http)
    held, free = (spec.sampling.grammar for spec in (seen[0], seen[-1]))
    assert "city" in held
    assert not free


CLIENT_TOOLS = [
    ("bash_20250124", "bash", {"command": "ls"}, {"path": "/x"}),
    ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/x"}, {"command": "undo_edit"}),
    (
        "text_editor_20250728",
        "str_replace_based_edit_tool",
        {"command": "view", "path": "/x", "view_range": [1, -1]},
        {"command": "undo_edit", "path": "/x"},
    ),
    ("memory_20250818", "memory", {"command": "view", "path": "/memories"}, {"command": "forget"}),
]


@pytest.mark.parametrize(("kind", "name", "input_", "wrong"), CLIENT_TOOLS)
async def test_tools_that_the_client_runs_are_offered_with_their_schemas(
    http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer, kind: str, name: str, input_: Any, wrong: Any
) -> None:
    seen = says(json.dumps(input_))
    tools = [{"type": kind, "name": name, "max_characters": 9, "cache_control": {"type": "ephemeral"}}, *TOOLS]
    message = await whole(http, tools=tools, tool_choice={"type": "tool", "name": name})
    assert [(one["type"], one["name"], one["input"]) for one in message["content"]] == [("tool_use", name, input_)]
    assert takes(seen[0].sampling.grammar, json.dumps(input_))
    assert not takes(seen[0].sampling.grammar, json.dumps(wrong))
    assert prompt_in(seen, tokenizer).startswith(f"[{name}][weather][time]<user>")
    counted = await http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": ASKED["messages"], "tools": tools}
    )
    assert counted.json() == {"input_tokens": len(seen[0].token_ids)}
