"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from services.gateway.access import Caller
from services.gateway.bodies import Incoming, PromptBounds, rendered, small
from services.gateway.errors import InvalidRequest
from services.gateway.http.chat import parse_chat, read_messages, template_options
from services.gateway.http.format import CheckTurn, ParsedBody
from services.gateway.http.messages.conversion import chat_of, thinks_in
from services.gateway.http.messages.events import MessageFrame, MessageOptions
from services.gateway.http.messages.offered import offered
from services.gateway.http.messages.schema import (
    CountTokensBody,
    MessageParam,
    MessagesBody,
    asks_to_cache,
    check_extras,
)
from services.gateway.http.schema import validated
from services.gateway.llm import LLM
from services.gateway.tools import read_tools
from services.gateway.untrusted import ChatTemplate, TemplateOptions

NAMES = {"stop": "stop_sequences"}
# How errors of a chat name what a message calls otherwise.
OWN = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema": "output_config.format",
    "continue_final_message": "messages",
}
# Stands for messages that a helper has taken out.
TAKEN = [MessageParam(role="user", content="")]


async def read_messages_body(llm: LLM, body: Incoming, check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found = validated(MessagesBody, body.fields)
    check_extras(found)
    chat, sampling = chat_of(found, llm.model.chat_template), _sampling(found, llm.model.thoughts is not None)
    with _own_names():
        parsed = await parse_chat(llm, chat, sampling, body.text, check_turn, clips=True, names=NAMES)
    return replace(parsed, envelope=partial(MessageFrame, llm.new_id, _options(llm, found)))


async def count_tokens(llm: LLM, body: Incoming, client: Caller) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    found = validated(CountTokensBody, body.fields)
    check_extras(found)
    llm.served(found.model, client)
    text = body.text
    if text is None:
        text = await llm.render_chat(*_rendering(found, llm.model.chat_template))
    return {"input_tokens": len(await llm.encode_chat(text, llm.access.cache_salt(body.owner, "")))}


def reduce_messages(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """In the helper process, of either route.

    Raises:
        InvalidRequest
    """
    found = validated(CountTokensBody, body)
    check_extras(found)
    text = rendered(*_rendering(found, template), template, bounds)
    if asks_to_cache(found):
        found.cache_control = {"type": "ephemeral"}
    if found.tools:
        found.tools = [tool.model_copy(update={"defer_loading": None}) for _, tool in offered(found)]
    found.messages, found.system = TAKEN, None
    return Incoming(small(found.model_dump_json(exclude_unset=True).encode(), "messages"), [text])


def _rendering(
    found: CountTokensBody, template: ChatTemplate | None
) -> tuple[list[Mapping[str, Any]], TemplateOptions]:
    chat = chat_of(found, template)
    with _own_names():
        use = read_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    return read_messages(chat.messages), template_options(chat, use)


@contextmanager
def _own_names() -> Iterator[None]:
    """A tool's fields, by their names in a chat."""
    try:
        yield
    except InvalidRequest as error:
        message, param = (_own(text or "") for text in (error.message, error.param))
        raise InvalidRequest(message, param or None, error.code) from None


def _own(text: str) -> str:
    for theirs, ours in OWN.items():
        text = text.replace(theirs, ours)
    return text


def _options(llm: LLM, found: MessagesBody) -> MessageOptions:
    return MessageOptions(
        max_tokens=found.max_tokens,
        caches=asks_to_cache(found),
        hides_thoughts=found.thinking is not None and found.thinking.display == "omitted",
        eager=frozenset(tool.name for tool in found.tools or () if tool.eager_input_streaming),
        manages_context=found.context_management is not None,
        block_size=max((worker.info.block_size for worker in llm.pool.workers), default=1),
    )


def _sampling(found: MessagesBody, may_think: bool) -> dict[str, Any]:
    budget = found.thinking.budget_tokens if found.thinking and thinks_in(found) and may_think else None
    said = {
        "temperature": found.temperature, "top_p": found.top_p, "top_k": found.top_k, "seed": found.seed,
        "thinking_token_budget": budget,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    return {**given, "stop": tuple(found.stop_sequences)} if found.stop_sequences else given
