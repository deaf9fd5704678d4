"""The tools that a response may call, as a chat knows them.

function     itself
custom       a function of one text, `input`
namespace    each of its tools, as namespace__name
others       only OpenAI runs those. Left out where the model may do without: beside another tool, or with `none`

`allowed_tools` leaves those that it names; the model is not shown the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.tools import MAX_TOOLS, text_function

NAME = re.compile(r"[\w.-]{1,64}")
HOSTED = re.compile(
    r"(web_search|file_search|code_interpreter|computer|image_generation|mcp|tool_search|local_shell|shell|apply_patch"
    r"|programmatic_tool_calling)(_\w+)?"
)
MODES = ("none", "auto", "required")
CHOICES = "none, auto, required, or an object of type function, custom or allowed_tools"
TYPES = (
    ("description", str, "a string"),
    ("parameters", Mapping, "a JSON schema, an object"),
    ("strict", bool, "true or false"),
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the client runs."""

    kind: str
    name: str
    namespace: str | None
    function: Mapping[str, Any]  # the chat's


@dataclass(frozen=True, slots=True)
class Toolbox:
    tools: Mapping[str, Tool] = field(default_factory=dict)  # tools that may be called, by their names in the chat
    choice: Any = None  # the chat's
    said: Sequence[Any] = ()  # the client's tools, without those that are left out

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": tool.function} for tool in self.tools.values()]


def chat_name(name: str, namespace: str | None) -> str:
    """Returns a tool's name in the chat; a namespace that makes it too long is left out."""
    whole = f"{namespace}__{name}" if namespace else name
    return whole if NAME.fullmatch(whole) else name


def read_toolbox(said: Sequence[Any], choice: Any) -> Toolbox:
    """Raises InvalidRequest."""
    tools: dict[str, Tool] = {}
    own, hosted = [], []
    for i, one in enumerate(said):
        where = f"tools[{i}]"
        if not isinstance(one, Mapping):
            raise InvalidRequest(f"{where} must be an object", where)
        if is_hosted(one.get("type")):
            hosted.append((where, one["type"]))
            continue
        own.append(one)
        for place, tool in _tools(one, where):
            if tools.setdefault(tool.function["name"], tool) is not tool:
                raise InvalidRequest(f"{place}.name: another tool is called {tool.name!r}, too", f"{place}.name")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}", "tools")
    if hosted and not tools and choice != "none":
        raise _unsupported(*hosted[0])
    allowed, chat_choice = _choice(choice, tools)
    return Toolbox(allowed, chat_choice, own)


def is_hosted(kind: Any) -> bool:
    return isinstance(kind, str) and HOSTED.fullmatch(kind) is not None


def _unsupported(param: str, kind: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: tools of type {kind} are not run by this server", param, "unsupported_parameter")


def _tools(said: Mapping[str, Any], where: str) -> Iterator[tuple[str, Tool]]:
    if said.get("type") != "namespace":
        yield where, _tool(said, where, None)
        return
    namespace, inner = _name(said, where), said.get("tools")
    if not isinstance(said.get("description"), str):
        raise InvalidRequest(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(inner, list):
        raise InvalidRequest(f"{where}.tools must be a list", f"{where}.tools")
    for i, one in enumerate(inner):
        place = f"{where}.tools[{i}]"
        if not isinstance(one, Mapping):
            raise InvalidRequest(f"{place} must be an object", place)
        yield place, _tool(one, place, namespace)


def _tool(said: Mapping[str, Any], where: str, namespace: str | None) -> Tool:
    kind = said.get("type")
    if kind not in ("function", "custom"):
        allowed = "function or custom" if namespace else "function, custom or namespace"
        raise InvalidRequest(f"{where}.type must be {allowed}, got {kind!r}", f"{where}.type")
    name = _name(said, where)
    for key, wanted, what in TYPES:
        if said.get(key) is not None and not isinstance(said[key], wanted):
            raise InvalidRequest(f"{where}.{key} must be {what}", f"{where}.{key}")
    function: dict[str, Any] = {"name": chat_name(name, namespace), "description": said.get("description")}
    if kind == "custom":
        function |= text_function(said, where)
    else:
        function |= {"parameters": said.get("parameters"), "strict": said.get("strict")}
    return Tool(kind, name, namespace, {key: value for key, value in function.items() if value is not None})


def _name(said: Mapping[str, Any], where: str) -> str:
    name = said.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.name must be 1 to 64 letters, digits, _, . or -, got {name!r}", f"{where}.name")
    return name


def _choice(said: Any, tools: Mapping[str, Tool]) -> tuple[Mapping[str, Tool], Any]:
    """Returns the tools that may be called, and the chat's tool_choice."""
    match said:
        case None | "none" | "auto" | "required":
            if said == "required" and not tools:
                raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
            return tools, said
        case {"type": "function" | "custom" | "namespace", "name": str(name)}:
            named = _named(said, tools)
            if not named:
                raise InvalidRequest(f"tool_choice.name: no tool is named {name!r}", "tool_choice.name")
            if said["type"] != "namespace":
                return tools, {"type": "function", "function": {"name": named[0]}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            return _allowed(allowed, tools), mode
        case {"type": str(kind)} if is_hosted(kind):
            raise _unsupported("tool_choice", kind)
    raise InvalidRequest(f"tool_choice must be {CHOICES}, got {said!r}", "tool_choice")


def _allowed(said: Sequence[Any], tools: Mapping[str, Tool]) -> Mapping[str, Tool]:
    names: list[str] = []
    for i, one in enumerate(said):
        if isinstance(one, Mapping) and is_hosted(one.get("type")):
            continue
        where = f"tool_choice.tools[{i}]"
        if not isinstance(one, Mapping) or not (found := _named(one, tools)):
            raise InvalidRequest(f"{where}: no such tool", where)
        names += found
    if not names:
        raise InvalidRequest("tool_choice.tools: none of them is run by the client", "tool_choice.tools")
    return {name: tool for name, tool in tools.items() if name in names}


def _named(said: Mapping[str, Any], tools: Mapping[str, Tool]) -> list[str]:
    """Returns the names of the tools that an entry means; a namespace means all tools in it."""
    kind, name, namespace = (said.get(key) for key in ("type", "name", "namespace"))
    if kind == "namespace":
        return [key for key, tool in tools.items() if tool.namespace == name]
    found = [key for key, tool in tools.items() if (tool.kind, tool.name) == (kind, name)]
    return [key for key in found if tools[key].namespace == namespace] or found
