"""Tools of /v1/responses: what the template sees of them, and the items that a call becomes, held strictly to types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from services.gateway.bodies import LARGE
from services.gateway.text import Tokenizer
from services.gateway.tools import OnlyString
from tests.gateway.peers import MODEL
from tests.gateway.test_responses import client
from tests.gateway.tools.test_calls import CALL, PLACE, prompt_in, says

__all__ = ["client", "says"]  # fixtures
WEATHER = {"type": "function", "name": "weather", "description": "today's", "parameters": PLACE, "strict": False}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
AGENTS = {
    "type": "namespace", "name": "agents", "description": "others",
    "tools": [{"type": "function", "name": "close", "parameters": {}}, {"type": "custom", "name": "tell"}],
}  # fmt: skip
TOOLS = [WEATHER, PATCH, AGENTS, {"type": "web_search"}]
ASKED: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": TOOLS}


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def streamed(client: AsyncOpenAI, **said: Any) -> list[Any]:
    return [event.to_dict() async for event in await client.responses.create(**ASKED | said, stream=True)]


def of_item(events: list[Any], item: Any) -> list[Any]:
    return [event for event in events if event.get("item_id") == item["id"]]


@pytest.mark.long
async def test_calls_are_the_same_items_whole_and_streamed(client: AsyncOpenAI, says: Any) -> None:
    patch = call_of("patch", '{"input": "a \\"b\\"\\n\\ud83e\\udd8a"}')
    says(f"Look.\n{CALL}\n{patch}")
    message, weather, patched = await both(client)
    assert message["content"][0]["text"] == "Look."
    done = {"status": "completed"}
    assert weather == {"type": "function_call", "name": "weather", "arguments": '{"city": "Malmö"}', **done}
    assert patched == {"type": "custom_tool_call", "name": "patch", "input": 'a "b"\n🦊', **done}
    says(call_of("agents__close", "{}") + call_of("agents__tell", '{"input": ""}'))
    closed, told = await both(client)
    assert closed == {"type": "function_call", "name": "close", "namespace": "agents", "arguments": "{}", **done}
    assert told == {"type": "custom_tool_call", "name": "tell", "namespace": "agents", "input": "", **done}


async def both(client: AsyncOpenAI) -> Any:
    """The items, without their ids, which differ."""
    events = await streamed(client)
    found = [(await client.responses.create(**ASKED)).to_dict()["output"], events[-1]["response"]["output"]]
    assert all(len({item["id"] for item in output}) == len(output) for output in found)
    whole, stream = (
        [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]
        for output in found
    )
    assert whole == stream
    return whole


async def test_the_events_of_a_call_are_its_items(client: AsyncOpenAI, says: Any) -> None:
    says(CALL + call_of("patch", '{"input": "a b c"}'))
    events = await streamed(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: Any = events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    ended = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in output]
    assert [event["item"] for event in ended] == output
    assert [(event["output_index"], event["item"]["status"]) for event in added] == [
        (0, "in_progress"),
        (1, "in_progress"),
    ]
    for item, field, name in zip(
        output, ("arguments", "input"), ("function_call_arguments", "custom_tool_call_input"), strict=True
    ):
        *deltas, done = of_item(events, item)
        assert {event["type"] for event in deltas} == {f"response.{name}.delta"}
        assert done["type"] == f"response.{name}.done"
        assert "".join(event["delta"] for event in deltas) == done[field] == item[field]
        assert len(deltas) > 2


async def test_half_a_call_is_none(client: AsyncOpenAI, says: Any) -> None:
    says(CALL)
    for found in (
        (await client.responses.create(**ASKED, max_output_tokens=55)).to_dict(),
        (await streamed(client, max_output_tokens=55))[-1]["response"],
    ):
        assert (found["status"], found["output"]) == ("incomplete", [])


@pytest.mark.parametrize("before", ["", "Look. "])
async def test_a_call_that_the_model_has_not_ended_is_text(client: AsyncOpenAI, says: Any, before: str) -> None:
    text = before + CALL.partition("mö")[0]
    says(text)
    output = await both(client)
    assert {(item["type"], item["status"]) for item in output} == {("message", "completed")}
    assert "".join(item["content"][0]["text"] for item in output) == text


async def test_the_template_sees_tools_calls_and_results(client: AsyncOpenAI, says: Any, tokenizer: Tokenizer) -> None:
    seen = says("Fine.")
    items: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "there"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Look:", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "weather", "arguments": '{"city": "Lund"}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "tell", "namespace": "agents", "input": "go"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "cold"}]},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "gone"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": '},
        {"type": "function_call_output", "call_id": "c", "output": ""},
    ]  # fmt: skip
    await client.responses.create(**{**ASKED, "input": items}, instructions="be kind")
    assert prompt_in(seen, tokenizer) == (
        "[weather][patch][agents__close][agents__tell]<system>be kind\nbe brief\n<user>hi\nthere\n"
        '<assistant>Look:weather{"city": "Lund"}agents__tell{"input": "go"}\n<tool>colda\n<tool>goneb\n'
        '<assistant>weather{"INVALID_JSON": "{\\"city\\": "}\n<tool>c\n'
    )


async def test_choices_of_tools(client: AsyncOpenAI, says: Any, tokenizer: Tokenizer) -> None:
    seen = says('{"input": "go"}')
    found = await client.responses.create(**ASKED, tool_choice={"type": "custom", "name": "patch"})
    assert [item.to_dict()["input"] for item in found.output] == ["go"]
    assert "input" in seen[0].sampling.grammar
    seen = says('[{"name": "weather", "arguments": {"city": "A"}}]')
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    found = await client.responses.create(**ASKED, tool_choice=allowed)
    assert [item.type for item in found.output] == ["function_call"]
    assert "weather" in seen[0].sampling.grammar
    assert "patch" not in seen[0].sampling.grammar
    assert prompt_in(seen, tokenizer) == "[weather]<user>hi\n"
    assert found.to_dict()["tool_choice"] == allowed
    said: Any = found.to_dict()["tools"]
    assert [tool["type"] for tool in said] == ["function", "custom", "namespace"]
    seen = says(f"so: {CALL}{CALL}")
    found = await client.responses.create(**ASKED, parallel_tool_calls=False)
    assert [item.type for item in found.output] == ["message", "function_call"]
    found = await client.responses.create(**ASKED, tool_choice="none")
    assert found.output_text == f"so: {CALL}{CALL}"


async def test_a_custom_tool_is_held_to_its_grammar(client: AsyncOpenAI, says: Any, http: httpx.AsyncClient) -> None:
    seen = says('{"input": "x"}')
    for choice in ({"type": "custom", "name": "patch"}, "required", "auto"):
        await client.responses.create(**ASKED, tool_choice=choice)
        assert '"pattern"' in seen[-1].sampling.grammar.replace("\\", ""), choice
    for tool in ({**PATCH, "format": {**PATCH["format"], "definition": "start: start"}}, AGENTS | {"tools": []}):
        answer = await http.post("/v1/responses", json={**ASKED, "tools": [tool, WEATHER], "tool_choice": "required"})
        assert (answer.status_code == 400) is (tool["name"] == "patch"), answer.text
        assert answer.status_code == 200 or "start leads back to itself" in answer.text


async def test_a_large_body_with_tools_is_read_as_a_small_one(
    http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    seen = says(CALL)
    for filler in ("", "x" * LARGE):
        answer = await http.post("/v1/responses", json={**ASKED, "x": filler})
        assert [item["type"] for item in answer.json()["output"]] == ["function_call"]
    assert len({prompt_in([spec], tokenizer) for spec in seen}) == 1


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
        ({"tools": [{"type": "fancy"}]}, "tools[0].type"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "parameters": {"x": 2**70}}]}, "tools"),
        ({"tools": [{**PATCH, "format": {"type": "x"}}]}, "tools[0].format"),
        ({"tools": [{**AGENTS, "tools": [AGENTS]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "x"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": "new_in_2030", "id": "x"}]}, "input[0].type"),
        ({"truncation": "some"}, "truncation"),
        ({"input": "x" * 20 * LARGE}, "input"),
        ({"input": [{"role": "user", "content": "x" * LARGE}, {"role": "king"}]}, "input[1].role"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, says: Any, said: dict[str, Any], param: str) -> None:
    says("x")
    answer = await http.post("/v1/responses", json=ASKED | said)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    assert "messages" not in error["message"]


@pytest.mark.fast
@pytest.mark.parametrize("text", ["", 'a"b', "\\", "\n\t\x7f", "🦊é", "\\u00e9", "a" * 99])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_string_is_read_as_it_comes(text: str, ascii_only: bool) -> None:
    said = json.dumps({"input": text}, ensure_ascii=ascii_only)
    for size in (1, 2, 3, 5, 7, len(said)):
        found = OnlyString()
        parts = [found.feed(said[at : at + size]) for at in range(0, len(said), size)]
        assert "".join(parts) + found.rest() == text
