"""The messages of a Messages body as the turns of a chat.

system, and messages of role system before all others   one system message, first
messages of role system after those                      in their places; as the user's if the template has none there
messages of one role in a row                            one message: templates may want roles to alternate
text, documents of text, search results                  their texts, a line each
thinking                                                 the thoughts of the assistant's message, for templates to show
tool_use, tool_result                                    a call of the assistant's message; a message of role tool
blocks of the assistant that Anthropic's server made     the text in results; else nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.apis.messages.schema import CountTokensBody, MessageParam
from services.gateway.chat import MergedTurns, Turn, call, result_text
from services.gateway.errors import InvalidRequest
from services.gateway.untrusted import ChatTemplate

# An agent's header that differs in each request: in a prompt it would prevent all cache hits.
BILLING = "x-anthropic-billing-header:"
# Prefix of call ids for clients. Templates get ids without it, as some accept only their own form.
CALL_ID = "toolu_"


def turns_of(body: CountTokensBody, template: ChatTemplate | None) -> MergedTurns:
    """Returns the turns of a body, those of the system as the template takes them. Raises InvalidRequest."""
    if not body.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    system = [text] if body.system and (text := text_of(body.system, "system")) else []
    turns = _turns(body.messages, system, template is None or template.facts.takes_late_system)
    if turns and turns[-1].role == "assistant" and not turns[-1].calls and not "".join(turns[-1].texts).strip():
        turns.pop()  # empty, so nothing to continue
    if not turns:
        raise InvalidRequest("messages: one of them must be the user's", "messages")
    if turns[-1].calls:
        raise InvalidRequest("messages: the last one calls tools, so their results must follow", "messages")
    if system and template is not None and not template.facts.takes_system:
        if turns[0].role != "user":
            turns.insert(0, Turn("user"))
        turns[0].texts[:0] = system
    elif system:
        turns.insert(0, Turn("system", system))
    return turns


def text_of(content: str | Sequence[Any], param: str) -> str:
    """Raises InvalidRequest: a block has no text."""
    if isinstance(content, str):
        return content
    texts = [_text(block, f"{param}[{i}]") for i, block in enumerate(content)]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _turns(said: Sequence[MessageParam], system: list[str], takes_late_system: bool) -> MergedTurns:
    """`system`: gets the texts of the system before the first turn."""
    turns = MergedTurns()
    for i, message in enumerate(said):
        where = f"messages[{i}].content"
        if message.role != "system":
            for turn in _turns_of(message, where):
                turns.add(turn)
        elif turns:
            turns.add(Turn("system" if takes_late_system else "user", [text_of(message.content, where)]))
        else:
            system.append(text_of(message.content, where))
    return turns


def _turns_of(message: MessageParam, where: str) -> Iterator[Turn]:
    """Yields a turn for each block."""
    if isinstance(message.content, str):
        yield Turn(message.role, [message.content])
        return
    for i, block in enumerate(message.content):
        param = f"{where}[{i}]"
        match message.role, block.get("type"):
            case "assistant", "tool_use":
                yield Turn(message.role, calls=[_tool_use(block, param)])
            case "assistant", "thinking":
                yield Turn(message.role, thoughts=[_string(block, "thinking", param)])
            case "assistant", "redacted_thinking":
                pass
            case "assistant", str(kind) if kind != "text":  # a block that Anthropic's server made
                if text := result_text(kind.removesuffix("_tool_result"), block.get("content")):
                    yield Turn(message.role, [text])
            case "user", "tool_result":
                yield Turn("tool", [_result(block, param)], answers=_call_id(block, "tool_use_id", param))
            case _:
                yield Turn(message.role, [_readable(block, param)])


def _tool_use(block: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}.input must be an object", f"{param}.input")
    return call(_call_id(block, "id", param), _string(block, "name", param), arguments)


def _call_id(block: Mapping[str, Any], name: str, param: str) -> str:
    return _string(block, name, param).removeprefix(CALL_ID)


def _result(block: Mapping[str, Any], param: str) -> str:
    """Returns a result's text, with a prefix if it is an error, as templates have no field for that."""
    content, param = block.get("content") or "", f"{param}.content"
    if not isinstance(content, str | list):
        raise InvalidRequest(f"{param} must be a string or a list of text blocks", param)
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(content))
    return f"Error: {content}" if block.get("is_error") is True else content


def _part(block: Any, param: str) -> str:
    """Returns the text of a result's block; a tool search's blocks have the names of found tools."""
    found = isinstance(block, Mapping) and block.get("type") == "tool_reference"
    return _string(block, "tool_name", param) if found else _readable(block, param)


def _readable(block: Any, param: str) -> str:
    """Returns the text of a block; of a document or search result with its metadata."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "document":
        return _tagged(block, kind, ("title", "context"), _source(block.get("source"), f"{param}.source"), param)
    if kind == "search_result":
        return _tagged(block, kind, ("title", "source"), _inner(block, param), param)
    return _text(block, param)


def _source(source: Any, param: str) -> str:
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "text":
        return _string(source, "data", param)
    if kind == "content":
        return _inner(source, param)
    raise InvalidRequest(f"{param}.type: only text and content are read here, got {kind!r}", f"{param}.type")


def _inner(block: Mapping[str, Any], param: str) -> str:
    content, param = block.get("content"), f"{param}.content"
    if not isinstance(content, str | list):
        raise InvalidRequest(f"{param} must be a string or a list of text blocks", param)
    return text_of(content, param)


def _tagged(block: Mapping[str, Any], kind: str, names: Sequence[str], text: str, param: str) -> str:
    about = [(name, _string(block, name, param)) for name in names if block.get(name) is not None]
    lines = [f"<{name}>{said}</{name}>" for name, said in about]
    return "\n".join([f"<{kind}>", *lines, text, f"</{kind}>"])


def _text(block: Any, param: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind != "text":
        raise InvalidRequest(f"{param}.type: {kind!r} is not supported here", f"{param}.type")
    return _string(block, "text", param)


def _string(block: Mapping[str, Any], name: str, param: str) -> str:
    if not isinstance(text := block.get(name), str):
        raise InvalidRequest(f"{param}.{name} must be a string", f"{param}.{name}")
    return text
