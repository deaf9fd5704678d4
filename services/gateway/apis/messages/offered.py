"""The tools that a Messages body offers, as functions of a chat.

Tools with `defer_loading` are offered once a result names them as `tool_reference`: the client searches for them. Where
Anthropic would search (`tool_search_tool_...`), all are offered and the search is left out: nothing is hidden from it.
Tools that the client runs and Anthropic has made (`bash_...`, `text_editor_...`, `memory_...`) get their schemas here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.gateway.apis.messages.client_tools import client_tool
from services.gateway.apis.messages.schema import CountTokensBody, ToolParam
from services.gateway.errors import InvalidRequest

SEARCHES = "tool_search_tool_"


def offered(body: CountTokensBody) -> list[tuple[int, ToolParam]]:
    """Returns the offered tools with their places in the body."""
    tools = body.tools or ()
    hosted = [tool for tool in tools if (tool.type or "").startswith(SEARCHES)]
    shown = None if hosted or not any(tool.defer_loading for tool in tools) else set(_referenced(body))
    return [
        (i, tool)
        for i, tool in enumerate(tools)
        if tool not in hosted and (shown is None or not tool.defer_loading or tool.name in shown)
    ]


def functions_of(tools: Sequence[tuple[int, ToolParam]]) -> list[dict[str, Any]]:
    """Raises InvalidRequest."""
    return [_function(tool, f"tools[{i}]") for i, tool in tools]


def _referenced(body: CountTokensBody) -> Iterator[str]:
    if body.tool_choice is not None and body.tool_choice.name is not None:
        yield body.tool_choice.name
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            parts = block.get("content")
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and part.get("type") == "tool_reference":
                    yield str(part.get("tool_name"))


def _function(tool: ToolParam, param: str) -> dict[str, Any]:
    description, schema = tool.description, tool.input_schema
    if tool.type not in (None, "custom"):
        if (known := client_tool(tool.type)) is None:
            where, what = f"{param}.type", "custom, bash_…, text_editor_… or memory_…, which the client runs"
            raise InvalidRequest(f"{where} must be {what}, got {tool.type!r}", where, "unsupported_parameter")
        description, schema = description or known[0], schema or dict(known[1])
    if schema is None:
        raise InvalidRequest(f"{param}.input_schema is required", f"{param}.input_schema")
    function = {"name": tool.name, "description": description, "parameters": schema, "strict": tool.strict}
    return {"type": "function", "function": {name: said for name, said in function.items() if said is not None}}
