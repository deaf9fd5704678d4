"""The items of a response as the turns of a chat.

messages of one role in a row     one turn: templates may want roles to alternate
reasoning                         thoughts of the assistant's turn after it
..._call                          calls of the assistant's turn
..._call_output                   a turn of role tool
items of OpenAI's server          see history.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.apis.responses.history import add_foreign
from services.gateway.apis.responses.schema import ResponseBody
from services.gateway.apis.responses.tools import chat_name
from services.gateway.chat import MergedTurns, Turn, call, text_parts
from services.gateway.errors import InvalidRequest
from services.gateway.tools import past_arguments

ROLES = ("user", "assistant", "system", "developer")
# The field that has the text, by the type of a part.
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
THOUGHTS = {"reasoning_text": "text", "summary_text": "text"}
KINDS = "message, reasoning, function_call, custom_tool_call, their outputs and items that OpenAI's server has made"


class ItemTurns:
    """A chat's turns, as items are added."""

    def __init__(self) -> None:
        self.turns = MergedTurns()
        self._thoughts = ""  # thoughts for the assistant's next turn

    def say(self, role: str, text: str) -> None:
        self._add(Turn("system" if role == "developer" else role, [text] if text else []))

    def think(self, text: str) -> None:
        self._thoughts = text

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        self._add(Turn("assistant", calls=[call(call_id, name, arguments)]))

    def answer(self, call_id: str, text: str) -> None:
        self._add(Turn("tool", [text], answers=call_id))

    def _add(self, turn: Turn) -> None:
        """Add a turn. Thoughts begin a new turn of the assistant, and are dropped before another role's turn."""
        thinks = turn.role == "assistant" and self._thoughts
        if thinks:
            turn.thoughts = [self._thoughts]
        self._thoughts = ""
        self.turns.add(turn, merges=not thinks)


def messages_of(body: ResponseBody) -> list[Mapping[str, Any]]:
    """Returns the messages of the chat that a response continues. Raises InvalidRequest."""
    made = ItemTurns()
    if body.instructions:
        made.say("system", body.instructions)
    if isinstance(body.input, str):
        made.say("user", body.input)
        return made.turns.messages()
    if not isinstance(body.input, list) or not body.input:
        raise InvalidRequest("input must be a string or a list of items, and not empty", "input")
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{where} must be an object", where)
        _add(made, item, where, i == len(body.input) - 1)
    if not made.turns:
        raise InvalidRequest("input must not be empty", "input")
    return made.turns.messages()


def _add(made: ItemTurns, item: Mapping[str, Any], where: str, is_last: bool) -> None:
    """Add the turns of an item. Earlier items may be of unknown types, the last one, which is answered, may not."""
    match item.get("type", "message"):
        case "message":
            if (role := item.get("role")) not in ROLES:
                raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
            made.say(role, _text(item.get("content"), f"{where}.content", PARTS, role == "assistant"))
        case "reasoning":
            thoughts = item.get("content") or item.get("summary")
            made.think(_text(thoughts, f"{where}.content", THOUGHTS, is_answer=True))
        case "function_call":
            arguments = _string(item, "arguments", where)
            made.call(*_called(item, where), past_arguments(arguments, f"{where}.arguments"))
        case "custom_tool_call":
            made.call(*_called(item, where), {"input": _string(item, "input", where)})
        case "function_call_output" | "custom_tool_call_output":
            said = _text(item.get("output"), f"{where}.output", PARTS)
            made.answer(_string(item, "call_id", where), said)
        case "item_reference":
            why = "no items are kept here to refer to: send the item itself"
            raise InvalidRequest(f"{where}.type: item_reference: {why}", f"{where}.type")
        case str(kind) if add_foreign(made, kind, item) or not is_last:
            pass
        case kind:
            raise InvalidRequest(f"{where}.type: only {KINDS} are supported, got {kind!r}", f"{where}.type")


def _called(item: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns the call's id, and the tool's name in the chat."""
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise InvalidRequest(f"{where}.namespace must be a string", f"{where}.namespace")
    return _string(item, "call_id", where), chat_name(_string(item, "name", where), namespace)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(text := item.get(name), str):
        raise InvalidRequest(f"{where}.{name} must be a string", f"{where}.{name}")
    return text


def _text(content: Any, where: str, parts: Mapping[str, str], is_answer: bool = False) -> str:
    """Returns a content's text. `is_answer`: from another server's model, so it may be missing or have other parts."""
    if isinstance(content, str):
        return content
    if content is None and is_answer:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    return "\n".join(text_parts(content, where, parts, is_answer))
