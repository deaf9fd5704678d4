"""POST /v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from services.gateway.apis.chat.format import ChatFormat
from services.gateway.apis.chat.functions import with_tools
from services.gateway.apis.openai import schema
from services.gateway.apis.openai.envelope import Envelope, namer
from services.gateway.apis.openai.structure import structure_of
from services.gateway.bodies import ChatPrompt, Incoming, PromptBounds
from services.gateway.chat import ChatRequest, prepare, text_parts
from services.gateway.directory import LLM
from services.gateway.door import CheckTurn, ParsedBody
from services.gateway.errors import InvalidRequest
from services.gateway.generation import read_response_format
from services.gateway.model import template_variables
from services.gateway.tools import ReadingPlan, ToolUse, read_call, read_tools
from services.gateway.untrusted import ROLES, ChatTemplate, TemplateOptions

# A chat's names of sampling parameters.
LOGPROBS, MAX_TOKENS = {"logprobs": "top_logprobs"}, {"max_tokens": "max_completion_tokens"}
# The field that has the text, by the type of a part.
ASKED = {"text": "text"}
ANSWERED = {"text": "text", "refusal": "refusal"}

# Text, or parts of text: the template shows which of the two it wants.
Content: TypeAlias = "str | list[Mapping[str, str]]"


class ChatReader(schema.JsonReader[schema.ChatBody]):
    field, taken = "messages", list[schema.ChatMessage]()

    def parse(self, data: bytes) -> schema.ChatBody:
        return schema.read(schema.ChatBody, data)

    def prompts(self, body: schema.ChatBody, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt:
        return chat_in(body, read_tools(body.tools, body.tool_choice, body.parallel_tool_calls))


CHAT = ChatReader()


async def read_chat(llm: LLM, incoming: Incoming[schema.ChatBody], check_turn: CheckTurn) -> ParsedBody:
    """Raises GatewayError."""
    body, given = incoming.body, schema.given_in(incoming.body, schema.ChatBody)
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    llm.bounds.check_choices(1, body.n or 1)
    terms = schema.terms_of(body)
    tenant = check_turn(terms, given.get("max_tokens"))
    use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    if (logprobs := _logprobs(body)) is not None:
        given["logprobs"] = logprobs
    chat = ChatRequest(
        prompt=chat_in(body, use) if incoming.text is None else incoming.text,
        use=use,
        structure=structure_of(body, read_response_format(body.response_format)),
        effort=body.reasoning_effort,
        given=given,
        names=LOGPROBS if body.max_completion_tokens is None else LOGPROBS | MAX_TOKENS,
        salt=terms.cache_salt,
        keep_last=body.truncate_prompt_tokens,
    )
    made = await prepare(llm, chat, tenant)
    return ParsedBody(
        terms=terms,
        n=body.n or 1,
        given=made.given,
        sampling=made.sampling,
        prompts=[made.ids],
        param="messages",
        operation="chat",
        frame=partial(Envelope, body, _format(llm, body, made.reading), "prompt_logprobs" in given),
        reading=made.reading,
    )


def _format(llm: LLM, body: schema.ChatBody, reading: ReadingPlan | None) -> ChatFormat:
    tokenizer = llm.model.tokenizer
    return ChatFormat(
        tokenizer,
        namer(tokenizer, body),
        lambda: reading.call_id(llm.shared.new_id()) if reading else "",
        body.include_reasoning is not False,
        reading.use.custom if reading and reading.use else frozenset(),
    )


def chat_in(body: schema.ChatBody | schema.TokenizeBody, use: ToolUse | None) -> ChatPrompt:
    """Raises InvalidRequest."""
    opened = body.add_generation_prompt
    options = TemplateOptions(
        add_generation_prompt=not body.continue_final_message if opened is None else opened,
        continue_final_message=bool(body.continue_final_message),
        variables=template_variables(body.chat_template_kwargs, body.reasoning_effort),
        tools=use.tools if use else (),
    )
    return ChatPrompt(read_messages(body.messages or ()), options)


def read_messages(said: Sequence[schema.ChatMessage]) -> list[Mapping[str, Any]]:
    """Raises InvalidRequest."""
    if not said:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(with_tools(said))]


def _logprobs(body: schema.ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _message(message: schema.ChatMessage, param: str) -> Mapping[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        allowed = ", ".join(ROLES)
        raise InvalidRequest(f"{param}.role must be one of {allowed}, got {message.role!r}", f"{param}.role")
    if role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{param}.tool_call_id is required of a tool", f"{param}.tool_call_id")
    said: dict[str, Any] = {"role": role, "content": _said(message, role, param)}
    if message.tool_calls and message.role == "assistant":
        said["tool_calls"] = [read_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    given["reasoning_content"] = message.reasoning or message.reasoning_content
    return said | {name: value for name, value in given.items() if value is not None}


def _said(message: schema.ChatMessage, role: str, param: str) -> Content:
    """Returns a message's content. An assistant's may be a refusal, speech, or nothing."""
    if role == "assistant" and message.content in (None, []):
        return message.refusal or _spoken(message.audio)
    return _content(message.content, f"{param}.content", role == "assistant")


def _spoken(audio: Any) -> str:
    """Returns the transcript of speech; "" if the message has only its id."""
    text = audio.get("transcript") if isinstance(audio, Mapping) else None
    return text if isinstance(text, str) else ""


def _content(content: Any, param: str, is_answer: bool) -> Content:
    """Returns text, or parts of text. `is_answer`: refusals are text, and other servers' parts are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{param} must be a string or a list of text parts", param)
    parts = text_parts(content, param, ANSWERED if is_answer else ASKED, is_answer)
    return [{"type": "text", "text": part} for part in parts] or ""
