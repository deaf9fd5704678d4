"""A Messages body as the chat that the pipeline takes.

system, and messages of role system   one system message, first
messages of one role in a row         one message: templates may want roles to alternate
text blocks                           their texts, a line each; cache_control changes nothing, for all is cached
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.http.messages.schema import CountTokensBody, MessagesBody
from services.gateway.http.schema import ChatBody, Message

THOUGHTS = ("thinking", "redacted_thinking")


def chat_of(body: CountTokensBody) -> ChatBody:
    """
    Raises:
        InvalidRequest
    """
    chat = ChatBody(model=body.model, messages=messages_of(body), chat_template_kwargs={"enable_thinking": False})
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
    merged: list[tuple[str, list[str]]] = []
    for i, message in enumerate(body.messages):
        text = text_of(message.content, f"messages[{i}].content")
        if message.role == "system":
            system.append(text)
        elif merged and merged[-1][0] == message.role:
            merged[-1][1].append(text)
        else:
            merged.append((message.role, [text]))
    if not merged or merged[-1][0] != "user":
        raise InvalidRequest("messages: the last message must be the user's", "messages")
    first = [Message(role="system", content="\n".join(system))] if system else []
    return first + [Message(role=role, content="\n".join(texts)) for role, texts in merged]


def text_of(content: str | Sequence[Any], param: str) -> str:
    """
    Raises:
        InvalidRequest: a block is none of text; earlier thoughts are left out.
    """
    if isinstance(content, str):
        return content
    texts = [_block(block, f"{param}[{i}]") for i, block in enumerate(content)]
    return "\n".join(text for text in texts if text is not None)


def _block(block: dict[str, Any], param: str) -> str | None:
    kind = block.get("type")
    if kind in THOUGHTS:
        return None
    if kind != "text":
        raise InvalidRequest(f"{param}.type: only text is supported, got {kind!r}", f"{param}.type")
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.text must be a string", f"{param}.text")
    return text
