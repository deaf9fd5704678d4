"""The bodies of /v1/messages and /v1/messages/count_tokens. Types only; null means unsaid, unknown fields are ignored.

Fields that would change the answer and are not supported are refused by name. Unknown hints count as none.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.apis.openai.schema import Body, HeldBody, Hint, Int
from services.gateway.errors import InvalidRequest

REFUSED = ("mcp_servers", "container", "compaction")
# The error code by which clients learn to send the whole conversation each time.
NO_THREADS = "thread_unsupported_request"


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolParam(Body):
    """A tool. Anthropic's own tools have no `input_schema`."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: Any = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Hint | None = None


class OutputConfig(Body):
    effort: Hint | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(Body):
    model: str
    messages: list[MessageParam]
    system: str | list[dict[str, Any]] | None = None
    thinking: ThinkingParam | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    cache_control: Any = None


class MessagesBody(CountTokensBody, HeldBody):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Int | None = None
    service_tier: Hint | None = None


def check_extras(body: CountTokensBody) -> None:
    """Raises InvalidRequest."""
    choice = body.tool_choice
    if choice is not None and (choice.name is None) == (choice.type == "tool"):
        raise InvalidRequest("tool_choice.name goes with type tool, and with no other", "tool_choice.name")
    thinking = body.thinking
    if thinking is not None and (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        where = "thinking.budget_tokens"
        raise InvalidRequest(f"{where} goes with type enabled, and with no other", where)
    said = body.model_extra or {}
    if said.get("thread"):
        raise InvalidRequest("thread: no conversation is kept here, send all of its messages", "thread", NO_THREADS)
    for name in REFUSED:
        if said.get(name):
            raise InvalidRequest(f"{name}: not supported by this server", name, "unsupported_parameter")


def asks_to_cache(body: CountTokensBody) -> bool:
    """True if any `cache_control` is there: of the body, a tool, a block, or a block within a result."""
    blocks: list[Any] = list(body.system) if isinstance(body.system, list) else []
    for message in body.messages:
        blocks += message.content if isinstance(message.content, list) else ()
    within = [inner for block in blocks if isinstance(inner := block.get("content"), list)]
    blocks += [block for inner in within for block in inner if isinstance(block, dict)]
    marks = [body.cache_control, *(tool.cache_control for tool in body.tools or ())]
    return any(mark is not None for mark in marks) or any(block.get("cache_control") is not None for block in blocks)
