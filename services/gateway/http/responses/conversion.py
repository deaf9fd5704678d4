"""A body of Responses as the body of a chat: items become messages, other fields get the names that a chat has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.http.responses.schema import ResponseBody
from services.gateway.http.schema import ChatBody, sampling_fields

ROLES = ("user", "assistant", "system", "developer")
# Each kind of part with text, and the field it has it in.
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Fields that are called the same in a chat. The same goes for sampling parameters beyond OpenAI's.
SAME = ("model", "stream", "temperature", "top_p", "service_tier", "user")
BEYOND = frozenset({"priority", "cache_salt"})


def chat_of(body: ResponseBody) -> dict[str, Any]:
    """
    Raises:
        InvalidRequest
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    known = sampling_fields(ChatBody) | BEYOND
    chat |= {name: value for name, value in (body.model_extra or {}).items() if name in known}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    chat["response_format"] = _response_format(body.text.format) if body.text and body.text.format else None
    return {name: value for name, value in chat.items() if value is not None}


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list) or not body.input:
        raise InvalidRequest("input must be a string or a list of items, and not empty", "input")
    thoughts = ""
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{where} must be an object", where)
        if item.get("type") == "reasoning":
            thoughts = _text(item.get("content") or [], f"{where}.content", {"reasoning_text": "text"})
            continue
        message = _message(item, where)
        if message["role"] == "assistant" and thoughts:
            message["reasoning_content"] = thoughts
        thoughts = ""
        messages.append(message)
    return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if (kind := item.get("type", "message")) != "message":
        raise InvalidRequest(f"{where}.type: only message and reasoning are supported, got {kind!r}", f"{where}.type")
    if (role := item.get("role")) not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
    content = item.get("content")
    return {"role": role, "content": _text(content, f"{where}.content", PARTS)}


def _text(content: Any, where: str, parts: Mapping[str, str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    return "\n".join(_part(part, f"{where}[{i}]", parts) for i, part in enumerate(content))


def _part(part: Any, where: str, parts: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in parts:
        raise InvalidRequest(f"{where}.type must be one of {', '.join(parts)}, got {kind!r}", f"{where}.type")
    text = part.get(parts[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{parts[kind]} must be a string", f"{where}.{parts[kind]}")
    return text


def _response_format(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema's fields stand beside its type here, and below it in a chat."""
    if said.get("type") != "json_schema":
        return said
    return {"type": "json_schema", "json_schema": {name: value for name, value in said.items() if name != "type"}}
