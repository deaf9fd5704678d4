"""Custom tools and choices among tools in a chat, and what earlier turns may say of calls."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from benchmarks.json_schema_suite import takes
from services.gateway.bodies import LARGE
from services.gateway.text import Tokenizer
from tests.gateway.peers import MODEL
from tests.gateway.tools.test_calls import ASKED, CALL, TOOLS, answered, client, prompt_in, says

__all__ = ["client", "says"]  # fixtures
FORM = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]+"}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "a patch", "format": FORM}}
TELL = {"type": "custom", "custom": {"name": "tell"}}
CUSTOM: dict[str, Any] = {**ASKED, "tools": [*TOOLS, PATCH, TELL]}


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def allowed(mode: str, *names: str) -> Any:
    kinds = {"patch": "custom", "tell": "custom"}
    tools = [{"type": (kind := kinds.get(name, "function")), kind: {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a \\"b\\"\\n\\ud83e\\udd8a"}', 'a "b"\n🦊'),
        ('{"input": ""}', ""),
        ('{"text": "x"}', '{"text": "x"}'),  # the model has called it wrongly: the client sees how
        ("{}", "{}"),
    ],
)
async def test_calls_of_custom_tools_are_texts_whole_and_streamed(
    client: AsyncOpenAI, says: Any, arguments: str, text: str
) -> None:
    says(f"Look.\n{CALL}\n{call_of('tell', arguments)}")
    choice = (await client.chat.completions.create(**CUSTOM)).choices[0].to_dict()
    message: Any = choice["message"]
    weather, told = message["tool_calls"]
    assert (choice["finish_reason"], message["content"], weather["type"]) == ("tool_calls", "Look.", "function")
    assert (told["type"], told["custom"]) == ("custom", {"name": "tell", "input": text})
    parts: dict[int, list[Any]] = {}
    async for chunk in await client.chat.completions.create(**CUSTOM, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            parts.setdefault(part.index, []).append(part.to_dict())
    assert "".join(part["function"]["arguments"] for part in parts[0]) == weather["function"]["arguments"]
    assert "".join(part["custom"]["input"] for part in parts[1]) == text
    (begun,) = [part for part in parts[1] if "id" in part]
    assert (begun["type"], begun["custom"]["name"]) == ("custom", "tell")
    assert parts[1][0] is begun


async def test_a_custom_tool_is_held_to_its_form(client: AsyncOpenAI, http: httpx.AsyncClient, says: Any) -> None:
    seen = says('{"input": "ab"}')
    choice = {"type": "custom", "custom": {"name": "patch"}}
    message: Any = (await client.chat.completions.create(**CUSTOM, tool_choice=choice)).choices[0].message.to_dict()
    assert message["tool_calls"][0]["custom"] == {"name": "patch", "input": "ab"}
    assert takes(seen[0].sampling.grammar, '{"input": "ab"}')
    assert not takes(seen[0].sampling.grammar, '{"input": "x"}')
    form = {"type": "grammar", "syntax": "lark", "definition": "start: start"}
    body = {**CUSTOM, "tools": [*TOOLS, {"type": "custom", "custom": {"name": "patch", "format": form}}]}
    for tool_choice in ("auto", "required"):
        answer = await http.post("/v1/chat/completions", json={**body, "tool_choice": tool_choice})
        error = answer.json()["error"]
        assert error["param"] == "tools[2].custom.format"
        assert error["message"].startswith("tools[2].custom.format: tool 'patch': x-lark: start leads back to itself")


async def test_the_template_sees_custom_tools_as_functions_of_one_text(
    client: AsyncOpenAI, says: Any, tokenizer: Tokenizer
) -> None:
    seen = says("ok")
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "ab"}}
    await client.chat.completions.create(**{**CUSTOM, "messages": answered(call, "done")})
    assert prompt_in(seen, tokenizer) == (
        '[weather][time][patch][tell]<user>hi\n<assistant>patch{"input": "ab"}\n<tool>donec1\n'
    )


async def test_only_allowed_tools_are_offered(client: AsyncOpenAI, says: Any, tokenizer: Tokenizer) -> None:
    seen = says('[{"name": "time", "arguments": {}}]')
    await client.chat.completions.create(**CUSTOM, tool_choice=allowed("required", "time", "patch"))
    grammar = seen[0].sampling.grammar
    assert takes(grammar, '[{"name": "time", "arguments": {}}]')
    assert not takes(grammar, '[{"name": "weather", "arguments": {"city": "A"}}]')
    assert prompt_in(seen, tokenizer).startswith("[time][patch]<user>")
    seen = says("no")
    await client.chat.completions.create(**CUSTOM, tool_choice=allowed("auto", "weather"))
    assert not seen[0].sampling.grammar
    assert prompt_in(seen, tokenizer).startswith("[weather]<user>")


@pytest.mark.parametrize("said", ['{"text": "unfin', "null", "[]", "", " ", "3", None, {}])
async def test_arguments_of_any_kind_do_not_end_a_conversation(
    client: AsyncOpenAI, says: Any, tokenizer: Tokenizer, said: Any
) -> None:
    seen = says("ok")
    call = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": said}}
    await client.chat.completions.create(model=MODEL, messages=answered(call, "bad arguments"))
    shown = json.dumps({"INVALID_JSON": said} if said in ('{"text": "unfin', "[]", "3") else {})
    assert prompt_in(seen, tokenizer) == f"<user>hi\n<assistant>note{shown}\n<tool>bad argumentsc1\n"


@pytest.mark.parametrize("said", [{"content": None}, {"content": []}, {}, {"content": None, "tool_calls": []}])
async def test_an_assistant_may_have_said_nothing(
    client: AsyncOpenAI, says: Any, tokenizer: Tokenizer, said: dict[str, Any]
) -> None:
    seen = says("ok")
    messages: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", **said}]
    messages.append({"role": "user", "content": "so?"})
    await client.chat.completions.create(model=MODEL, messages=messages)
    assert prompt_in(seen, tokenizer) == "<user>hi\n<assistant>\n<user>so?\n"


async def test_a_large_body_with_custom_tools_is_read_as_a_small_one(
    http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    seen = says(call_of("tell", '{"input": "x"}'))
    for filler in ("", "x" * LARGE):
        answer = await http.post("/v1/chat/completions", json={**CUSTOM, "x": filler})
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": "tell", "input": "x"}
    assert len({prompt_in([spec], tokenizer) for spec in seen}) == 1


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "y"}}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "nobody"}}}, "tool_choice.custom.name"),
        ({"tool_choice": {"type": "custom", "custom": "patch"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("auto", *["time"] * 129)}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("auto", "time", "nobody")}, "tool_choice.allowed_tools.tools[1]"),
        ({"tool_choice": allowed("none", "time")}, "tool_choice"),
        ({"tools": None, "tool_choice": allowed("auto", "time")}, "tool_choice"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, says: Any, said: dict[str, Any], param: str) -> None:
    says("x")
    answer = await http.post("/v1/chat/completions", json=CUSTOM | said)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ({"type": "custom", "custom": {"name": "x"}}, "custom.input"),
        ({"type": "custom", "custom": {"input": "x"}}, "custom"),
        ({"type": "custom"}, "custom"),
        ({"type": "function", "function": {"name": "x", "arguments": 3}}, "function.arguments"),
        ({"type": "function", "function": {"arguments": "{}"}}, "function"),
    ],
)
async def test_a_call_that_is_none_is_named(http: httpx.AsyncClient, says: Any, call: Any, where: str) -> None:
    says("x")
    messages = [{"role": "assistant", "tool_calls": [call]}]
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[0].tool_calls[0].{where}"
