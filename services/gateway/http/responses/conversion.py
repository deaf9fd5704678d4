"""A body of Responses as the body of a chat: items become messages, other fields get the names that a chat has.

messages of one role in a row     one message: templates may want roles to alternate
reasoning                         thoughts of the assistant's message behind it
..._call                          calls of the assistant's message
..._call_output                   a message of role tool
items of OpenAI's server          see history.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.http.responses.history import add_foreign
from services.gateway.http.responses.schema import ResponseBody
from services.gateway.http.responses.tools import Toolbox, chat_name
from services.gateway.http.schema import ChatBody, HeldBody, sampling_fields
from services.gateway.tools import past_arguments

ROLES = ("user", "assistant", "system", "developer")
# Each kind of part with text, and the field it has it in.
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
THOUGHTS = {"reasoning_text": "text", "summary_text": "text"}
KINDS = "message, reasoning, function_call, custom_tool_call, their outputs and items that OpenAI's server has made"
# Fields that are called the same in a chat. The same goes for sampling parameters beyond OpenAI's.
SAME = (
    "model", "stream", "temperature", "top_p", "service_tier", "user", "parallel_tool_calls", *HeldBody.model_fields
)  # fmt: skip
BEYOND = frozenset({"priority", "cache_salt"})


def chat_of(body: ResponseBody, box: Toolbox) -> dict[str, Any]:
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
    chat["tools"], chat["tool_choice"] = box.functions or None, box.choice
    return {name: value for name, value in chat.items() if value is not None}


class _Messages:
    """A chat's, as items are added."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self._thoughts = ""

    def say(self, role: str, text: str) -> None:
        role = "system" if role == "developer" else role
        message = self._last(role)
        message["content"] = f"{message['content']}\n{text}" if message.get("content") else text

    def think(self, text: str) -> None:
        self._thoughts = text

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._last("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def answer(self, call_id: str, text: str) -> None:
        self.made.append({"role": "tool", "content": text, "tool_call_id": call_id})
        self._thoughts = ""

    def _last(self, role: str) -> dict[str, Any]:
        """The message that more of this role belongs to."""
        goes_on = self.made and self.made[-1]["role"] == role and not (role == "assistant" and self._thoughts)
        if not goes_on:
            self.made.append({"role": role})
        if role == "assistant" and self._thoughts:
            self.made[-1]["reasoning_content"] = self._thoughts
        self._thoughts = ""
        return self.made[-1]


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    messages = _Messages()
    if body.instructions:
        messages.say("system", body.instructions)
    if isinstance(body.input, str):
        messages.say("user", body.input)
        return messages.made
    if not isinstance(body.input, list) or not body.input:
        raise InvalidRequest("input must be a string or a list of items, and not empty", "input")
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{where} must be an object", where)
        _add(messages, item, where, i == len(body.input) - 1)
    return messages.made


def _add(messages: _Messages, item: Mapping[str, Any], where: str, is_last: bool) -> None:
    """Adds what an item says. Only earlier items may be of a type that nobody knows: the last one is to be answered."""
    match item.get("type", "message"):
        case "message":
            if (role := item.get("role")) not in ROLES:
                raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
            messages.say(role, _text(item.get("content"), f"{where}.content", PARTS, role == "assistant"))
        case "reasoning":
            thoughts = item.get("content") or item.get("summary")
            messages.think(_text(thoughts, f"{where}.content", THOUGHTS, is_answer=True))
        case "function_call":
            arguments = _string(item, "arguments", where)
            messages.call(*_called(item, where), past_arguments(arguments, f"{where}.arguments"))
        case "custom_tool_call":
            messages.call(*_called(item, where), {"input": _string(item, "input", where)})
        case "function_call_output" | "custom_tool_call_output":
            said = _text(item.get("output"), f"{where}.output", PARTS)
            messages.answer(_string(item, "call_id", where), said)
        case "item_reference":
            why = "no items are kept here to refer to: send the item itself"
            raise InvalidRequest(f"{where}.type: item_reference: {why}", f"{where}.type")
        case str(kind) if add_foreign(messages, kind, item) or not is_last:
            pass
        case kind:
            raise InvalidRequest(f"{where}.type: only {KINDS} are supported, got {kind!r}", f"{where}.type")


def _called(item: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The call's id, and what a chat calls the tool."""
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise InvalidRequest(f"{where}.namespace must be a string", f"{where}.namespace")
    return _string(item, "call_id", where), chat_name(_string(item, "name", where), namespace)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(text := item.get(name), str):
        raise InvalidRequest(f"{where}.{name} must be a string", f"{where}.{name}")
    return text


def _text(content: Any, where: str, parts: Mapping[str, str], is_answer: bool = False) -> str:
    """`is_answer`: another server's model may have said it, so it may be missing, or have parts that are left out."""
    if isinstance(content, str):
        return content
    if content is None and is_answer:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    found = [_part(part, f"{where}[{i}]", parts, is_answer) for i, part in enumerate(content)]
    return "\n".join(text for text in found if text is not None)


def _part(part: Any, where: str, parts: Mapping[str, str], is_answer: bool) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in parts:
        if is_answer and isinstance(kind, str):
            return None
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
