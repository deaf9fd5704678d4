"""Messages of the API before tools (`function_call`, the role `function`), rewritten with tools.

Such calls have no id, so one is made of their place: nine letters and digits, which all templates accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.gateway.apis.openai.schema import ChatMessage
from services.gateway.errors import InvalidRequest


def with_tools(said: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Raises InvalidRequest."""
    if not any(message.function_call or message.role == "function" for message in said):
        return said
    made: list[ChatMessage] = []
    call_id = _id(0)
    for i, message in enumerate(said):
        if message.role == "function":
            message = message.model_copy(update={"role": "tool", "tool_call_id": call_id})
        elif message.role == "assistant" and message.function_call and not message.tool_calls:
            call_id = _id(i)
            call = {"id": call_id, "type": "function", "function": _checked(message.function_call, i)}
            message = message.model_copy(update={"tool_calls": [call]})
        made.append(message)
    return made


def _id(place: int) -> str:
    return f"call{place % 100_000:05}"


def _checked(call: object, place: int) -> Mapping[str, object]:
    match call:
        case {"name": str(name), "arguments": str(arguments)}:
            return {"name": name, "arguments": arguments}
    where = f"messages[{place}].function_call"
    raise InvalidRequest(f"{where} must be an object with a name and arguments, both strings", where)
