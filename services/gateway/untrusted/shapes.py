"""Chats reshaped for templates that want another shape than most do.

most         calls in `tool_calls`, their arguments as objects; results by `tool`; tools as `tools`
gpt-oss      one call a message, its result behind it; thoughts as `thinking`, and none beside text that leads to a call
DeepSeek     arguments as text; no content is null; tools in the system message, where the template leaves them out
GLM-4        a call is a message with its name as `metadata`; a result is of `observation`
Phi-4-mini   tools are text in the system message
SmolLM3      tools are `xml_tools`

Where a template shows no calls, they are written into the text as the model writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Reshape = Callable[[Sequence[Message]], Iterator[Message]]
TOOLS = re.compile(r"\btools\b")
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\narguments\n```<｜tool▁call▁end｜>"
PLAIN = "<｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>"
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class ChatShape:
    def __init__(self, template: str) -> None:
        self._reshape = _shape_of(template)
        self._channels = "<|channel|>" in template
        self._xml_tools = "xml_tools" in template
        self._system_tools = next((made for mark, made in SYSTEM_TOOLS if mark in template), None)
        self._told = None
        if "<｜tool▁call▁begin｜>" in template and not TOOLS.search(template):
            self._told = _deepseek_tools(FENCED if "```json" in template else PLAIN)

    def messages(self, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
        made = list(self._reshape(messages))
        if not tools or not (self._told or self._system_tools):
            return made
        if not made or made[0]["role"] != "system":
            made.insert(0, {"role": "system", "content": ""})
        if self._told:
            return [{**made[0], "content": made[0]["content"] + self._told(tools)}, *made[1:]]
        assert self._system_tools is not None
        return [{**made[0], "tools": self._system_tools(tools)}, *made[1:]]

    def variables(self, tools: Tools, said: Mapping[str, Any]) -> dict[str, Any]:
        if self._channels:  # this template adds descriptions to text
            tools = [{**tool, "function": _described(tool["function"])} for tool in tools]
        found = {"tools": list(tools) or None, **said}
        if self._xml_tools and tools:
            found = {"xml_tools": list(tools), **found}
        if self._channels and isinstance(effort := found.get("reasoning_effort"), str):
            found["reasoning_effort"] = EFFORTS.get(effort, effort)
        return found


def _shape_of(template: str) -> Reshape:
    if "<|channel|>" in template:
        return _harmony
    if "<｜tool▁call▁begin｜>" in template:
        return _deepseek("message['content'] + '<｜tool▁calls▁begin｜>" in template)
    if "tool_calls" in template:
        return _unchanged
    return next((reshape for mark, reshape in SHAPES if mark in template), _unchanged)


def _unchanged(messages: Sequence[Message]) -> Iterator[Message]:
    yield from messages


def _harmony(messages: Sequence[Message]) -> Iterator[Message]:
    results = {m["tool_call_id"]: m for m in messages if m["role"] == "tool" and "tool_call_id" in m}
    shown: set[int] = set()
    for message in messages:
        thoughts = message.get("reasoning_content")
        kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "tool_calls")}
        kept = {**kept, "thinking": thoughts} if thoughts else kept
        if not message.get("tool_calls"):
            if id(message) not in shown:
                yield kept
            continue
        for i, call in enumerate(message["tool_calls"]):
            first = {**kept, "content": ""} if thoughts else kept
            yield {**(first if i == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]}
            if (result := results.get(call.get("id"))) is not None and id(result) not in shown:
                shown.add(id(result))
                yield result


def _deepseek(joins: bool) -> Reshape:
    """Returns the reshaping for DeepSeek. `joins`: its template shows content before calls."""

    def reshape(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            if not message.get("tool_calls"):
                yield message
                continue
            calls = [{**call, "function": _spelled(call["function"])} for call in message["tool_calls"]]
            if message["content"] and not joins:
                yield {"role": "assistant", "content": message["content"]}
            yield {**message, "content": (message["content"] if joins else "") or None, "tool_calls": calls}

    return reshape


def _deepseek_tools(form: str) -> Callable[[Tools], str]:
    """Returns tools as text, for templates that show calls but no tools."""

    def told(tools: Tools) -> str:
        said = "".join(f"\n\n### {_as_text(tool['function'])}" for tool in tools)
        return (
            f"\n\n## Tools\nYou have access to the following tools:{said}\n\nTo call tools write exactly this, with "
            f"a JSON object for arguments, once for each call between its marks:\n<｜tool▁calls▁begin｜>{form}"
            "<｜tool▁calls▁end｜>"
        )

    return told


def _as_text(function: Mapping[str, Any]) -> str:
    described = _described(function)
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return f"{function['name']}\nDescription: {described['description']}\n\nParameters: {parameters}"


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "description": function.get("description") or ""}


def _spelled(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _glm4(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if message["role"] == "tool":
            yield {**message, "role": "observation"}
            continue
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            yield {key: value for key, value in message.items() if key != "tool_calls"}
        for call in calls:
            said = _spelled(call["function"])
            yield {"role": "assistant", "metadata": said["name"], "content": said["arguments"]}


def _written(calls: Callable[[list[str]], str], role: str) -> Reshape:
    """Returns a reshaping with calls as text, each in JSON, and results by `role`."""

    def reshape(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            made = {**message, "role": role if message["role"] == "tool" else message["role"]}
            if said := made.pop("tool_calls", None):
                objects = [json.dumps(_named(call["function"]), ensure_ascii=False) for call in said]
                made["content"] += calls(objects)
            yield made

    return reshape


def _named(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


_granite = _written(lambda calls: f"<|tool_call|>[{', '.join(calls)}]", "tool_response")
_phi4 = _written(lambda calls: f"<|tool_call|>[{', '.join(calls)}]<|/tool_call|>", "tool_response")
_as_hermes = _written(lambda calls: "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls), "tool")
# Reshapings of templates that show no calls, by a mark in the template.
SHAPES = (
    ("metadata", _glm4),
    ("message['tools']", _phi4),
    ("<|tool_call|>", _granite),
    ("<tool_call>", _as_hermes),
)
SYSTEM_TOOLS: Sequence[tuple[str, Callable[[Tools], Any]]] = (
    ("message['tools']", lambda tools: json.dumps([tool["function"] for tool in tools], ensure_ascii=False)),
    ("item['tools']", list),
)
