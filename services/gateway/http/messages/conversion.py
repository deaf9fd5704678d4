"""A Messages body as the chat that the pipeline takes.

thinking        off unless it asks for some: the template hears `enable_thinking` and `thinking`, and a model whose
                template reads neither gets a budget of 0
output_config   `effort` is a chat's reasoning_effort where the model thinks, `format` its response_format
"""

from __future__ import annotations

from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.http.messages.offered import functions_of, offered
from services.gateway.http.messages.schema import CountTokensBody, MessagesBody
from services.gateway.http.messages.turns import continues, messages_of
from services.gateway.http.schema import ChatBody, HeldBody
from services.gateway.untrusted import ChatTemplate

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensBody, template: ChatTemplate | None) -> ChatBody:
    """
    Raises:
        InvalidRequest
    """
    chat = ChatBody(model=body.model, messages=messages_of(body, template))
    chat.continue_final_message = continues(chat.messages)
    thinks, output = thinks_in(body), body.output_config
    chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}
    chat.reasoning_effort = (output.effort if output else None) if thinks else "none"
    chat.response_format = _response_format(body)
    chat.tools = functions_of(offered(body)) or None
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat.tool_choice = CHOICES.get(choice.type, named)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody):
        chat.stream, chat.max_completion_tokens = body.stream, body.max_tokens
        for name in HeldBody.model_fields:
            setattr(chat, name, getattr(body, name))
    return chat


def thinks_in(body: CountTokensBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _response_format(body: CountTokensBody) -> dict[str, Any] | None:
    """As `output_config.format`, or as an older beta has it."""
    inner = body.output_config.format if body.output_config else None
    said, where = (inner, "output_config.format") if inner is not None else (body.output_format, "output_format")
    if said is None:
        return None
    if said.get("type") != "json_schema":
        raise InvalidRequest(f"{where}.type must be json_schema, got {said.get('type')!r}", f"{where}.type")
    if not isinstance(schema := said.get("schema"), dict):
        raise InvalidRequest(f"{where}.schema must be a JSON schema, an object", f"{where}.schema")
    return {"type": "json_schema", "json_schema": {"schema": schema}}
