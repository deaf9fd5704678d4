"""`truncation: auto`: an input without its oldest items, so that the rest fits the model's context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import orjson
from pydantic_core import to_json

from services.gateway.apis.responses.schema import ResponseBody
from services.gateway.bodies import Incoming, Reduced
from services.gateway.chat import PreparedChat
from services.gateway.directory import LLM
from services.gateway.errors import InvalidRequest

TOO_LONG = "context_length_exceeded"
# The most attempts to shorten an input; the last result is served or refused as it is.
ROUNDS = 8
STAY = ("system", "developer")
T = TypeVar("T")
# Reads a body as a chat. The text: its prompt, if a helper process has rendered it.
Read = Callable[[ResponseBody, str | None], Awaitable[PreparedChat]]


async def read_fitting(
    llm: LLM, body: Incoming[ResponseBody], reduce: Callable[..., Reduced], read: Read
) -> PreparedChat:
    """Returns the chat of a body, or of as many of its newest items as fit.

    Args:
        reduce: reduces a large body again to `most` bytes of items.

    Raises:
        GatewayError
    """
    found, reduced = body.body, body.reduced
    if found.truncation != "auto" or (reduced is None and not isinstance(found.input, list)):
        return await read(found, reduced.text if reduced else None)
    items = (reduced.items or b"[]") if reduced else to_json(found.input)
    most = len(items)
    for _ in range(ROUNDS):
        try:
            chat = await read(found, reduced.text if reduced else None)
            needed, room = len(chat.ids), llm.max_model_len - (chat.given.get("max_tokens") or 1)
            if needed <= room or room <= 0:
                return chat
            most = int(0.95 * most * room / needed)
        except InvalidRequest as error:
            if error.code != TOO_LONG:
                raise
            most //= 2
        if reduced is not None:
            reduced = await llm.reduced(partial(reduce, most=most), _whole(found, items), body.owner)
        elif (left := newest(found.input, most)) != found.input:
            found = found.model_copy(update={"input": left})
        else:
            break
    return await read(found, reduced.text if reduced else None)


def _whole(found: ResponseBody, items: bytes) -> bytes:
    """Returns the body with the items that a helper process removed."""
    fields = found.model_dump(exclude_unset=True, exclude={"input"})
    return orjson.dumps({**fields, "input": orjson.Fragment(items)})


def rendered_fitting(found: ResponseBody, render: Callable[[], T]) -> T:
    """Returns `render()`, dropping the body's oldest items while it has too many characters. Runs in a helper process.

    Raises InvalidRequest.
    """
    while True:
        try:
            return render()
        except InvalidRequest as error:
            left = newest(found.input, len(to_json(found.input)) // 2)
            if found.truncation != "auto" or error.code != TOO_LONG or left == found.input:
                raise
            found.input = left


def newest(items: Any, most: int) -> Any:
    """Returns the newest items within `most` bytes. System messages stay; results are dropped with their calls."""
    if not isinstance(items, list):
        return items
    kept: list[Any] = []
    gone: list[Any] = []
    for item in reversed(items):
        most -= len(to_json(item))
        fits = most >= 0 and not gone
        (kept if not kept or fits or _field(item, "role") in STAY else gone).append(item)
    lost = {_field(item, "call_id") for item in gone} - {None}
    return [item for item in reversed(kept) if _field(item, "call_id") not in lost]


def _field(item: Any, name: str) -> str | None:
    value = item.get(name) if isinstance(item, Mapping) else None
    return value if isinstance(value, str) else None
