"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from services.gateway.bodies import ChatPrompt, Incoming, PromptBounds
from services.gateway.directory import LLM
from services.gateway.errors import InvalidRequest
from services.gateway.http.chat import chat_in, parse_chat
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
from services.gateway.http.schema import JsonReader
from services.gateway.tools import read_tools
from services.gateway.untrusted import ChatTemplate

NAMES = {"stop": "stop_sequences"}
# How errors of a chat name what a message calls otherwise.
OWN = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema": "output_config.format",
    "continue_final_message": "messages",
}


M = TypeVar("M", bound=CountTokensBody)


class MessagesReader(JsonReader[M], Generic[M]):
    """Reads the body of either route."""

    field, taken = "messages", [MessageParam(role="user", content="")]

    def __init__(self, kind: type[M]) -> None:
        self.kind = kind

    def parse(self, data: bytes) -> M:
        found = super().parse(data)
        check_extras(found)
        return found

    def prompts(self, body: M, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt:
        chat = chat_of(body, template)
        with _own_names():
            return chat_in(chat, read_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls))

    def dump(self, body: M) -> bytes:
        if asks_to_cache(body):
            body.cache_control = {"type": "ephemeral"}
        if body.tools:
            body.tools = [tool.model_copy(update={"defer_loading": None}) for _, tool in offered(body)]
        body.system = None
        return super().dump(body)


MESSAGES, COUNTED = MessagesReader(MessagesBody), MessagesReader(CountTokensBody)


async def read_messages_body(llm: LLM, body: Incoming[MessagesBody], check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found = body.body
    chat, sampling = chat_of(found, llm.model.chat_template), _sampling(found, llm.model.thoughts is not None)
    with _own_names():
        parsed = await parse_chat(llm, chat, sampling, body.text, check_turn, clips=True, names=NAMES)
    return replace(parsed, envelope=partial(MessageFrame, llm.shared.new_id, _options(llm, found)))


async def count_tokens(llm: LLM, body: Incoming[CountTokensBody]) -> dict[str, Any]:
    """
    Raises:
        GatewayError
    """
    text = await llm.text_of(body)
    return {"input_tokens": len(await llm.encode_chat(text, llm.shared.access.cache_salt(body.owner, "")))}


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
