"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar

from services.gateway.apis.messages.conversion import effort_of, format_of, prompt_of, thinks_in, use_of
from services.gateway.apis.messages.events import MessageFrame, MessageOptions
from services.gateway.apis.messages.offered import offered
from services.gateway.apis.messages.schema import (
    CountTokensBody,
    MessageParam,
    MessagesBody,
    asks_to_cache,
    check_extras,
)
from services.gateway.apis.openai.schema import JsonReader
from services.gateway.apis.openai.structure import structure_of
from services.gateway.bodies import ChatPrompt, Incoming, PromptBounds
from services.gateway.chat import ChatRequest, named_as, prepare
from services.gateway.directory import LLM
from services.gateway.door import CheckTurn, ParsedBody, Terms
from services.gateway.untrusted import ChatTemplate

NAMES = {"stop": "stop_sequences"}
# Names of a chat's fields in errors, and what Messages calls them.
OWN = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "continue_final_message": "messages",
}


M = TypeVar("M", bound=CountTokensBody)


class MessagesReader(JsonReader[M], Generic[M]):
    """Reads the bodies of both routes."""

    field, taken = "messages", [MessageParam(role="user", content="")]

    def __init__(self, kind: type[M]) -> None:
        self.kind = kind

    def parse(self, data: bytes) -> M:
        found = super().parse(data)
        check_extras(found)
        return found

    def prompts(self, body: M, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt:
        with named_as(OWN):
            return prompt_of(body, template, use_of(body))

    def dump(self, body: M) -> bytes:
        if asks_to_cache(body):
            body.cache_control = {"type": "ephemeral"}
        if body.tools:
            body.tools = [tool.model_copy(update={"defer_loading": None}) for _, tool in offered(body)]
        body.system = None
        return super().dump(body)


MESSAGES, COUNTED = MessagesReader(MessagesBody), MessagesReader(CountTokensBody)


async def read_messages_body(llm: LLM, body: Incoming[MessagesBody], check_turn: CheckTurn) -> ParsedBody:
    """Raises GatewayError."""
    found, terms = body.body, Terms(body.body.model, streamed=bool(body.body.stream))
    with named_as(OWN):
        tenant = check_turn(terms, found.max_tokens)
        template, use = llm.model.chat_template, use_of(found)
        chat = ChatRequest(
            prompt=prompt_of(found, template, use) if body.text is None else body.text,
            use=use,
            structure=structure_of(found, format_of(found)),
            effort=effort_of(found),
            given=_sampling(found, llm.model.thoughts is not None),
            names=NAMES,
            clips=True,
        )
        made = await prepare(llm, chat, tenant)
    return ParsedBody(
        terms=terms,
        given=made.given,
        sampling=made.sampling,
        prompts=[made.ids],
        param="messages",
        operation="chat",
        frame=partial(MessageFrame, llm.shared.new_id, _options(llm, found)),
        reading=made.reading,
    )


async def count_tokens(llm: LLM, body: Incoming[CountTokensBody]) -> dict[str, Any]:
    """Raises GatewayError."""
    text = await llm.text_of(body)
    return {"input_tokens": len(await llm.encode_chat(text, llm.shared.access.cache_salt(body.owner, "")))}


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
    given["max_tokens"] = found.max_tokens
    return {**given, "stop": tuple(found.stop_sequences)} if found.stop_sequences else given
