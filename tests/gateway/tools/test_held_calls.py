"""Calls that must be made: held to their tools' schemas as far as grammars can hold them, whatever else is offered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from grpc import aio
from openai import AsyncOpenAI

from benchmarks.json_schema_suite import takes
from services.gateway import Gateway
from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.tools.test_calls import ASKED, PLACE, client, says

__all__ = ["client", "says"]  # fixtures
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
# Properties that no grammar can hold, and values of them that are no text that the rest of the schema allows.
ODD: dict[str, tuple[Any, list[Any]]] = {
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 3}}, [1, "x"]),
    "uniqueItems": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, [[1], {}]),
    "not": ({"not": {}}, []),
    "format": ({"type": "string", "format": "uri-reference"}, [1]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, ["x"]),
    "look-ahead": ({"type": "string", "pattern": "^(?!-)[a-z-]+$"}, []),
    "elsewhere": ({"$ref": "http://example.com/x"}, []),
    "no type": ({"type": "objekt"}, []),
    "unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 2}, []),
}


def odd(part: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"part": part}, "required": ["part"]}
    return {"type": "function", "function": {"name": "odd", "parameters": parameters, **more}}


def call(name: str, **arguments: Any) -> str:
    return json.dumps([{"name": name, "arguments": arguments}])


@pytest.mark.parametrize("kind", ODD)
async def test_a_schema_that_no_grammar_can_hold_is_held_in_part(client: AsyncOpenAI, says: Any, kind: str) -> None:
    part, wrong = ODD[kind]
    seen = says(call("weather", city="A"))
    asked = {**ASKED, "tools": [WEATHER, odd(part)]}
    await client.chat.completions.create(**asked, tool_choice="required")
    grammar = seen[0].sampling.grammar
    assert takes(grammar, call("weather", city="A"))
    assert not takes(grammar, call("weather", city=1))
    assert not takes(grammar, call("weather", city="A", more=1))
    values = ["x"] if kind in ("format", "look-ahead", "elsewhere", "no type", "not") else [{"a": "b"}, ["a"], 3]
    assert any(takes(grammar, call("odd", part=value)) for value in values)
    assert not any(takes(grammar, call("odd", part=value)) for value in wrong)
    named = {"type": "function", "function": {"name": "odd"}}
    seen = says('{"part": "x"}')
    await client.chat.completions.create(**asked, tool_choice=named)
    assert any(takes(seen[0].sampling.grammar, json.dumps({"part": value})) for value in values)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("choice", ["required", "auto", "named"])
async def test_a_strict_tool_that_no_grammar_can_hold_is_refused_by_name(
    http: httpx.AsyncClient, says: Any, kind: str, choice: str
) -> None:
    seen = says("x")
    tool_choice = choice if choice != "named" else {"type": "function", "function": {"name": "odd"}}
    tools = [WEATHER, odd(ODD[kind][0], strict=True)]
    answer = await http.post("/v1/chat/completions", json={**ASKED, "tools": tools, "tool_choice": tool_choice})
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"].startswith("tools[1].function.parameters"), error
    assert "'odd'" in error["message"]
    assert_shows_no_grammar(error["message"])
    assert not seen


def assert_shows_no_grammar(message: str) -> None:
    assert not [word for word in ("%json", "call_0", "arguments_", "start:", "whitespace_pattern") if word in message]


async def test_other_apis_name_the_tool_their_own_way(http: httpx.AsyncClient, says: Any) -> None:
    says("x")
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    asked: dict[str, Any] = {"model": ASKED["model"], "messages": ASKED["messages"], "max_tokens": 5}
    tool = {"name": "odd", "input_schema": schema, "strict": True}
    body = {**asked, "tools": [{"name": "now", "input_schema": {}}, tool], "tool_choice": {"type": "any"}}
    said = (await http.post("/v1/messages", json=body)).json()["error"]["message"]
    assert said.startswith("tools[1].input_schema.properties.a: tool 'odd': "), said
    tool = {"type": "function", "name": "odd", "parameters": schema, "strict": True}
    body = {"model": ASKED["model"], "input": "hi", "tools": [tool], "tool_choice": "required"}
    error = (await http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "tools[0].parameters.properties.a"
    assert error["message"].startswith("tools[0].parameters.properties.a: tool 'odd': "), error


async def test_grpc_names_the_tool(gateway: Gateway, says: Any) -> None:
    says("x")
    tool = llm_pb2.Tool(name="odd", parameters='{"properties": {"a": {"not": {}}}}', strict=True)
    message = llm_pb2.ChatMessage(role="user", content="hi")
    asked = llm_pb2.GenerateRequest(
        model=ASKED["model"], messages=llm_pb2.ChatMessages(messages=[message]), tools=[tool],
        tool_choice=llm_pb2.ToolChoice(mode=llm_pb2.ToolChoice.MODE_REQUIRED),
    )  # fmt: skip
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        service: Any = llm_pb2_grpc.LLMServiceStub(channel)
        with pytest.raises(aio.AioRpcError) as refused:
            await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked), timeout=10)
    assert (refused.value.details() or "").startswith("tools[0].parameters.properties.a: tool 'odd': ")


@pytest.mark.parametrize("said", [{}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}])
async def test_a_tool_without_parameters_gets_no_arguments(
    client: AsyncOpenAI, says: Any, said: dict[str, Any]
) -> None:
    seen = says("{}")
    asked = {**ASKED, "tools": [{"type": "function", "function": {"name": "now", **said}}]}
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        await client.chat.completions.create(**asked, tool_choice=choice)
    of_list, of_one = (seen[i].sampling.grammar for i in (0, -1))
    assert takes(of_list, call("now"))
    assert not takes(of_list, call("now", a=1))
    assert takes(of_one, "{}")
    assert not takes(of_one, '{"a": 1}')
