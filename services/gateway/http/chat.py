"""POST /v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.generation import Delta, read_sampling, truncated
from services.gateway.http import schema
from services.gateway.http.format import Format, ParsedBody, logprob_entries, structure_of
from services.gateway.llm import LLM
from services.gateway.text import ROLES, TemplateOptions, Tokenizer


async def read_chat(llm: LLM, body: bytes) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found, given = schema.read(schema.ChatBody, body)
    llm.served(found.model)
    llm.check_choices(1, found.n or 1)
    messages = read_messages(found.messages)
    names = {"logprobs": "top_logprobs"}
    if (logprobs := _logprobs(found)) is not None:
        given["logprobs"] = logprobs
    if found.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
        given["max_tokens"] = found.max_completion_tokens
    return ParsedBody(
        body=found,
        n=found.n or 1,
        given=given,
        sampling=await read_sampling(given, llm.model, names, structure_of(found)),
        prompts=[truncated(await llm.encode_chat(messages, template_options(found)), found.truncate_prompt_tokens)],
        param="messages",
        operation="chat",
        format=ChatFormat(llm.model.tokenizer),
        with_prompt_logprobs="prompt_logprobs" in given,
    )


class ChatFormat(Format):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_logprobs_in_choice = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def delta(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text}
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            said = {"role": "assistant", **said}
        return {"delta": said, "logprobs": self._logprobs(delta)}

    def choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.tokens.logprobs:
            return None
        return {"content": logprob_entries(self._tokenizer, delta.tokens.logprobs), "refusal": None}


def template_options(body: schema.ChatBody | schema.TokenizeBody) -> TemplateOptions:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    opened = body.add_generation_prompt
    return TemplateOptions(
        add_generation_prompt=not body.continue_final_message if opened is None else opened,
        continue_final_message=bool(body.continue_final_message),
        variables=variables,
    )


def read_messages(said: Sequence[schema.Message]) -> list[Mapping[str, Any]]:
    """
    Raises:
        InvalidRequest
    """
    if not said:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(said)]


def _logprobs(body: schema.ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _message(message: schema.Message, param: str) -> Mapping[str, Any]:
    schema.refuse_message_extras(message, param)
    role = ROLES.get(message.role)
    if role is None:
        allowed = ", ".join(ROLES)
        raise InvalidRequest(f"{param}.role must be one of {allowed}, got {message.role!r}", f"{param}.role")
    said = {"role": role, "content": _content(message.content, f"{param}.content")}
    return said if message.name is None else {**said, "name": message.name}


def _content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{param} must be a string or a list of text parts", param)
    return "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{param} must be an object with a type", param)
    if part["type"] != "text":
        raise InvalidRequest(f"{param}.type: only text is supported, got {part['type']!r}", f"{param}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.text must be a string", f"{param}.text")
    return text
