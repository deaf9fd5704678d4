"""The tools that a request offers, and what it says of their use.

tools                 [{"type": "function", "function": {"name", "description", "parameters", "strict"}},
                       {"type": "custom", "custom": {"name", "description", "format"}}]
tool_choice           auto | none | required | {"type": "function", "function": {"name"}}, the same of a custom tool
                      {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [...]}}
parallel_tool_calls   false: at most one call
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.tools.call import parsed
from services.gateway.tools.custom import text_function

MAX_TOOLS = 128
NAME = re.compile(r"[\w.-]{1,128}")
NAMED = '{"type": "function", "function": {"name": ...}} or {"type": "custom", "custom": {"name": ...}}'
CHOICES = (
    f"auto, none, required, {NAMED}, or "
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)
FIELDS = (
    ("parameters", Mapping, "a JSON schema, an object"),
    ("description", str, "a string"),
    ("strict", bool, "true or false"),
)
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, at least one."""

    tools: Sequence[Mapping[str, Any]]  # for the chat template: functions as the client sent them
    schemas: Mapping[str, Mapping[str, Any]]  # parameters of callable tools, by name
    strict: frozenset[str]
    custom: frozenset[str]
    places: Mapping[str, str]  # where the schemas are in the body's `tools`, by name
    required: bool
    named: str | None
    parallel: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    mode: str = "auto"
    names: Sequence[tuple[str, str]] = ()  # callable tools with their places in the body; empty: all
    named: bool = False  # the named tool must be called


@dataclass(frozen=True, slots=True)
class _Tool:
    function: Mapping[str, Any]
    shown: Mapping[str, Any]  # as the chat template gets it
    place: str
    is_custom: bool = False


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """Returns the tools of a request; None if none may be called. Raises InvalidRequest."""
    asked = _choice(choice)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}", "tools")
    offered = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    schemas = {tool.function["name"]: _parameters(tool.function) for tool in offered}
    for name, param in asked.names:
        if name not in schemas:
            raise InvalidRequest(f"{param}: no tool is named {name!r}", param)
    if asked.mode == "none":
        return None
    names = {name for name, _ in asked.names} or schemas.keys()
    return ToolUse(
        tools=[tool.shown for tool in offered if asked.named or tool.function["name"] in names],
        schemas={name: schema for name, schema in schemas.items() if name in names},
        strict=frozenset(names & {tool.function["name"] for tool in offered if tool.function.get("strict")}),
        custom=frozenset(tool.function["name"] for tool in offered if tool.is_custom),
        places={tool.function["name"]: tool.place for tool in offered},
        required=asked.mode == "required",
        named=asked.names[0][0] if asked.named else None,
        parallel=parallel is not False,
    )


def read_call(call: Any, param: str) -> Mapping[str, Any]:
    """Returns a call of an earlier answer with arguments as an object, as templates want them.

    Raises InvalidRequest.
    """
    custom = isinstance(call, Mapping) and call.get("type") == "custom"
    where = f"{param}.custom" if custom else f"{param}.function"
    said = call.get("custom" if custom else "function") if isinstance(call, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        what = "an input" if custom else "arguments"
        raise InvalidRequest(f"{where} must be an object with a name and {what}", where)
    if not custom:
        arguments = past_arguments(said.get("arguments"), f"{where}.arguments")
    elif isinstance(said.get("input"), str):
        arguments = {"input": said["input"]}
    else:
        raise InvalidRequest(f"{where}.input must be a string", f"{where}.input")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": said["name"], "arguments": arguments}}


def past_arguments(said: Any, param: str) -> Mapping[str, Any]:
    """Returns the arguments of an earlier call; malformed ones as the text that the model wrote.

    Raises InvalidRequest.
    """
    if not said or isinstance(said, Mapping):
        return said or {}
    if not isinstance(said, str):
        raise InvalidRequest(f"{param} must be a JSON object, as text", param)
    found = parsed(said) if said.strip() not in ("", "null") else {}
    return found if isinstance(found, dict) else {"INVALID_JSON": said}


def _choice(said: Any) -> _Choice:
    match said:
        case None:
            return _Choice()
        case "auto" | "none" | "required":
            return _Choice(said)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            return _Choice(mode, _allowed(allowed, "tool_choice.allowed_tools.tools"))
    if (named := _named(said)) is not None:
        kind, name = named
        return _Choice(names=[(name, f"tool_choice.{kind}.name")], named=True)
    raise InvalidRequest(f"tool_choice must be {CHOICES}, got {said!r}", "tool_choice")


def _named(said: Any) -> tuple[str, str] | None:
    """Returns the kind and the name in {"type": kind, kind: {"name": ...}}."""
    match said:
        case {"type": "function", "function": {"name": str(name)}}:
            return "function", name
        case {"type": "custom", "custom": {"name": str(name)}}:
            return "custom", name
    return None


def _allowed(said: Sequence[Any], param: str) -> Sequence[tuple[str, str]]:
    """Returns the names of tools that may be called, each with its place."""
    if not 0 < len(said) <= MAX_TOOLS:
        raise InvalidRequest(f"{param} must have 1 to {MAX_TOOLS} tools, got {len(said)}", param)
    found = []
    for i, one in enumerate(said):
        if (named := _named(one)) is None:
            raise InvalidRequest(f"{param}[{i}] must be {NAMED}", f"{param}[{i}]")
        found.append((named[1], f"{param}[{i}]"))
    return found


def _tool(tool: Any, param: str) -> _Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind not in ("function", "custom"):
        raise InvalidRequest(f"{param}.type must be function or custom", f"{param}.type")
    said, where = tool.get(kind), f"{param}.{kind}"
    if not isinstance(said, Mapping):
        raise InvalidRequest(f"{where} must be an object", where)
    name = said.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        what = f"must be 1 to 128 letters, digits, _, . or -, got {name!r}"
        raise InvalidRequest(f"{where}.name {what}", f"{where}.name")
    for key, wanted, what in FIELDS:
        if said.get(key) is not None and not isinstance(said[key], wanted):
            raise InvalidRequest(f"{where}.{key} must be {what}", f"{where}.{key}")
    place = where.removeprefix("tools")
    if kind == "function":
        return _Tool(said, tool, f"{place}.parameters")
    function = {"name": name, **text_function(said, where)}
    function = {key: value for key, value in function.items() if value is not None}
    return _Tool(function, {"type": "function", "function": function}, f"{place}.format", is_custom=True)


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    said = function.get("parameters")
    return {"type": "object", **said} if said else NO_PARAMETERS
