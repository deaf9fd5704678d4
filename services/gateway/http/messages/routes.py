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
from services.gateway.http.messages.conversion import chat_of
from services.gateway.http.messages.events import MessageFrame
from services.gateway.http.messages.schema import CountTokensBody, MessageParam, MessagesBody, check_extras
from services.gateway.http.schema import validated
from services.gateway.llm import LLM
from services.gateway.text import ChatTemplate, TemplateOptions
from services.gateway.tools import read_tools

NAMES = {"stop": "stop_sequences"}
# Stands for messages that a helper has taken out.
TAKEN = [MessageParam(role="user", content="")]


async def read_messages_body(llm: LLM, body: Incoming, check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found = validated(MessagesBody, body.fields)
    check_extras(found)
    with _own_names():
        parsed = await parse_chat(llm, chat_of(found), _sampling(found), body.text, check_turn, clips=True, names=NAMES)
    return replace(parsed, envelope=partial(MessageFrame, llm.new_id), max_tokens_said=found.max_tokens)


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
        text = llm.render_chat(*_rendering(found))
    return {"input_tokens": len(await llm.encode(text, "messages", add_special_tokens=False))}


def reduce_messages(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """In the helper process, of either route.

    Raises:
        InvalidRequest
    """
    found = validated(CountTokensBody, body)
    check_extras(found)
    text = rendered(*_rendering(found), template, bounds)
    found.messages, found.system = TAKEN, None
    return Incoming(small(found.model_dump_json(exclude_unset=True).encode(), "messages"), [text])


def _rendering(found: CountTokensBody) -> tuple[list[Mapping[str, Any]], TemplateOptions]:
    chat = chat_of(found)
    with _own_names():
        use = read_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    return read_messages(chat.messages), template_options(chat, use)


@contextmanager
def _own_names() -> Iterator[None]:
    """What a chat calls a tool's fields."""
    try:
        yield
    except InvalidRequest as error:
        message, param = (_own(text or "") for text in (error.message, error.param))
        raise InvalidRequest(message, param or None, error.code) from None


def _own(text: str) -> str:
    return text.replace(".function.parameters", ".input_schema").replace(".function.", ".")


def _sampling(found: MessagesBody) -> dict[str, Any]:
    said = {"temperature": found.temperature, "top_p": found.top_p, "top_k": found.top_k, "seed": found.seed}
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    return {**given, "stop": tuple(found.stop_sequences)} if found.stop_sequences else given
