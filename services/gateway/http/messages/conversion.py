"""A Messages body as the chat that the pipeline takes.

system, and messages of role system   one system message, first
messages of one role in a row         one message: templates may want roles to alternate
text blocks                           their texts, a line each; cache_control changes nothing, for all is cached
tool_use, tool_result                 a call of the assistant's message; a message of role tool
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.http.messages.schema import CountTokensBody, MessageParam, MessagesBody, ToolParam
from services.gateway.http.schema import ChatBody, Message

THOUGHTS = ("thinking", "redacted_thinking")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(slots=True)
class _Turn:
    role: str
    texts: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    answers: str | None = None  # the id of a call

    def message(self) -> Message:
        content = None if self.calls and not self.texts else "\n".join(self.texts)
        return Message(role=self.role, content=content, tool_calls=self.calls or None, tool_call_id=self.answers)


def chat_of(body: CountTokensBody) -> ChatBody:
    """
    Raises:
        InvalidRequest
    """
    chat = ChatBody(model=body.model, messages=messages_of(body), chat_template_kwargs={"enable_thinking": False})
    chat.tools = [_function(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat.tool_choice = CHOICES.get(choice.type, named)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody):
        chat.stream, chat.max_completion_tokens = body.stream, body.max_tokens
    return chat


def messages_of(body: CountTokensBody) -> list[Message]:
    """
    Raises:
        InvalidRequest
    """
    if not body.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    system = [text_of(body.system, "system")] if body.system else []
    turns: list[_Turn] = []
    for i, message in enumerate(body.messages):
        where = f"messages[{i}].content"
        if message.role == "system":
            system.append(text_of(message.content, where))
            continue
        for turn in _turns(message, where):
            if turns and turns[-1].role == turn.role != "tool":
                turns[-1].texts += turn.texts
                turns[-1].calls += turn.calls
            else:
                turns.append(turn)
    if not turns or turns[-1].role == "assistant":
        raise InvalidRequest("messages: the last message must be the user's", "messages")
    first = [Message(role="system", content="\n".join(system))] if system else []
    return first + [turn.message() for turn in turns]


def text_of(content: str | Sequence[Any], param: str) -> str:
    """
    Raises:
        InvalidRequest: a block is none of text.
    """
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{param}[{i}]") for i, block in enumerate(content))


def _turns(message: MessageParam, where: str) -> Iterator[_Turn]:
    """Of each block one; earlier thoughts are left out."""
    if isinstance(message.content, str):
        yield _Turn(message.role, [message.content])
        return
    for i, block in enumerate(message.content):
        param = f"{where}[{i}]"
        match message.role, block.get("type"):
            case "assistant", "tool_use":
                yield _Turn(message.role, calls=[_call(block, param)])
            case "user", "tool_result":
                yield _Turn("tool", [_result(block, param)], answers=_string(block, "tool_use_id", param))
            case "assistant", str(kind) if kind in THOUGHTS:
                pass
            case _:
                yield _Turn(message.role, [_text(block, param)])


def _call(block: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}.input must be an object", f"{param}.input")
    function = {"name": _string(block, "name", param), "arguments": arguments}
    return {"id": _string(block, "id", param), "type": "function", "function": function}


def _result(block: Mapping[str, Any], param: str) -> str:
    """Templates have no word for an error, so its text says that it is one."""
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise InvalidRequest(f"{param}.content must be a string or a list of text blocks", f"{param}.content")
    text = text_of(content, f"{param}.content")
    return f"Error: {text}" if block.get("is_error") is True else text


def _function(tool: ToolParam, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        where = f"{param}.type"
        raise InvalidRequest(f"{where}: only custom tools run here, got {tool.type!r}", where, "unsupported_parameter")
    if tool.input_schema is None:
        raise InvalidRequest(f"{param}.input_schema is required", f"{param}.input_schema")
    function = {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict
    }  # fmt: skip
    return {"type": "function", "function": {name: said for name, said in function.items() if said is not None}}


def _text(block: Any, param: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind != "text":
        raise InvalidRequest(f"{param}.type: {kind!r} is not supported here", f"{param}.type")
    return _string(block, "text", param)


def _string(block: Mapping[str, Any], name: str, param: str) -> str:
    if not isinstance(text := block.get(name), str):
        raise InvalidRequest(f"{param}.{name} must be a string", f"{param}.{name}")
    return text
