"""The body of POST /v1/responses. Fields that would change the answer and are not supported are refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from services.gateway.apis.openai.schema import Body, HeldBody, Hint, Int, StreamOptions, validated, with_sampling
from services.gateway.door import Terms
from services.gateway.errors import InvalidRequest

MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
MOST_OF_TURN = 1000  # the most items that one request adds to a conversation
LOGPROBS = "message.output_text.logprobs"
# Fields of a chat that clients send by mistake, and their names here.
OF_CHATS = {"response_format": "text.format", "max_completion_tokens": "max_output_tokens"}


class Reasoning(Body):
    effort: Hint | None = None
    summary: Hint | None = None


class TextConfig(Body):
    format: dict[str, Any] | None = None
    verbosity: Hint | None = None


class ResponseBody(HeldBody):
    not_sampling = frozenset({"logprobs"})

    model: str
    input: Any
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    # Bounds tools that a server runs; this server runs none.
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    context_management: list[Any] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    service_tier: Hint | None = None
    priority: Int | None = None
    user: str | None = None
    cache_salt: str | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None


class ConversationBody(Body):
    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


class ItemsBody(Body):
    items: list[Any]


def read_body(body: bytes) -> ResponseBody:
    """Raises InvalidRequest: naming the first wrong field."""
    found: ResponseBody = validated(with_sampling(ResponseBody), body)
    if found.prompt is not None:
        raise _unsupported("prompt", "this server keeps no prompts")
    if found.background and found.store is False:
        raise InvalidRequest("background: what is made in the background is kept, and store is false", "background")
    if found.conversation is not None and isinstance(found.input, list) and len(found.input) > MOST_OF_TURN:
        said = f"at most {MOST_OF_TURN} items beside conversation, got {len(found.input)}"
        raise InvalidRequest(f"input: {said}", "input")
    if found.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(f"truncation must be auto or disabled, got {found.truncation!r}", "truncation")
    if found.top_logprobs or LOGPROBS in (found.include or ()):
        raise _unsupported("top_logprobs" if found.top_logprobs else "include", "logprobs are not supported here")
    if found.context_management:
        raise _unsupported("context_management", "nothing is compacted here; truncation auto leaves out what is old")
    for name, ours in OF_CHATS.items():
        if (found.model_extra or {}).get(name) is not None:
            raise _unsupported(name, f"in a response it is {ours}")
    check_metadata(found.metadata or {})
    return found


def terms_of(found: ResponseBody) -> Terms:
    """Returns what the body says beside its items."""
    return Terms(
        model=found.model,
        user=found.user or "",
        service_tier=found.service_tier,
        priority=found.priority,
        streamed=bool(found.stream),
        cache_salt=found.cache_salt or "",
    )


def _unsupported(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param, "unsupported_parameter")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidRequest."""
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata: at most {MAX_METADATA} entries, got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            most = f"keys of at most {MAX_METADATA_KEY} and values of at most {MAX_METADATA_VALUE} characters"
            raise InvalidRequest(f"metadata: {most}", "metadata")
