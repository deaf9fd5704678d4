"""The bodies of /v1/messages and /v1/messages/count_tokens. Types only; null means unsaid, unknown fields are ignored.

A field that would change the answer and is not done here is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.errors import InvalidRequest
from services.gateway.http.schema import Body

REFUSED = ("mcp_servers", "container")


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolParam(Body):
    """`input_schema` is missing in tools that only Anthropic hosts."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["disabled"]


class CountTokensBody(Body):
    model: str
    messages: list[MessageParam]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None


class MessagesBody(CountTokensBody):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def check_extras(body: CountTokensBody) -> None:
    """
    Raises:
        InvalidRequest
    """
    choice = body.tool_choice
    if choice is not None and (choice.name is None) == (choice.type == "tool"):
        raise InvalidRequest("tool_choice.name goes with type tool, and with no other", "tool_choice.name")
    said = body.model_extra or {}
    for name in REFUSED:
        if said.get(name):
            raise InvalidRequest(f"{name}: not supported by this server", name, "unsupported_parameter")
    output = said.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        where = "output_config.format"
        raise InvalidRequest(f"{where}: not supported by this server", where, "unsupported_parameter")
