"""The tools that a request offers, and what it says of their use.

tools                 [{"type": "function", "function": {"name", "description", "parameters", "strict"}}]
tool_choice           auto | none | required | {"type": "function", "function": {"name"}}
parallel_tool_calls   false: at most one call
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.tools.call import parsed

MAX_TOOLS = 128
NAME = re.compile(r"[\w.-]{1,128}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """At least one tool, and leave to call it."""

    tools: Sequence[Mapping[str, Any]]  # as the client gave them, for the chat template
    schemas: Mapping[str, Mapping[str, Any]]  # parameters by name, those of the named one only
    strict: frozenset[str]
    places: Mapping[str, str]  # of the schemas in `tools` of the body, by name
    required: bool
    named: str | None
    parallel: bool


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """None where no tool may be called.

    Raises:
        InvalidRequest
    """
    named = _named(choice)
    if named is None and choice not in (None, "auto", "none", "required"):
        raise InvalidRequest(
            f'tool_choice must be auto, none, required, or {{"type": "function", "function": {{"name": ...}}}}, '
            f"got {choice!r}", "tool_choice",
        )  # fmt: skip
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}", "tools")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    schemas = {function["name"]: _parameters(function) for function in functions}
    if named is not None and named not in schemas:
        raise InvalidRequest(f"tool_choice.function.name: no tool is named {named!r}", "tool_choice.function.name")
    if choice == "none":
        return None
    return ToolUse(
        tools=tools,
        schemas=schemas if named is None else {named: schemas[named]},
        strict=frozenset(function["name"] for function in functions if function.get("strict")),
        places={function["name"]: f"[{i}].function.parameters" for i, function in enumerate(functions)},
        required=choice == "required",
        named=named,
        parallel=parallel is not False,
    )


def read_call(call: Any, param: str) -> Mapping[str, Any]:
    """A call of an earlier answer, its arguments as an object: so templates want them.

    Raises:
        InvalidRequest
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{param}.function must be an object with a name and arguments", f"{param}.function")
    said = function.get("arguments")
    arguments = parsed(said or "{}") if isinstance(said, str) else said or {}
    if not isinstance(arguments, dict):
        where = f"{param}.function.arguments"
        raise InvalidRequest(f"{where} must be a JSON object, as text", where)
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _named(choice: Any) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def _function(tool: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(f"{param}.type must be function", f"{param}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{param}.function must be an object", f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        where = f"{param}.function.name"
        raise InvalidRequest(f"{where} must be 1 to 128 letters, digits, _, . or -, got {name!r}", where)
    for key, kind, what in (("parameters", Mapping, "a JSON schema, an object"), ("description", str, "a string"),
                            ("strict", bool, "true or false")):  # fmt: skip
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise InvalidRequest(f"{param}.function.{key} must be {what}", f"{param}.function.{key}")
    return function


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    said = function.get("parameters")
    return {"type": "object", **said} if said else NO_PARAMETERS
