"""Recalls the items that a response continues, and keeps the response at its end.

previous_response_id, conversation, item_reference ──> items ──> before those of the body ──> read as one body
its end ──> kept, within a bound of time ──> `completed` says whether it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from services.gateway.apis.responses.kept.kept import Kept, joined_lists
from services.gateway.apis.responses.schema import ResponseBody
from services.gateway.bodies import Incoming
from services.gateway.directory import LLM
from services.gateway.errors import GatewayError, InvalidRequest, NotKept
from services.gateway.shared import Shared

log = structlog.get_logger(__name__)
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
MOST_REFERENCES = 1000  # references in one input
KEPT_S = 7 * 86400
MAX_KEPT_BYTES = 2 * 2**20  # of one response with all items before it, or of one conversation
NEEDS_STORE = ("previous_response_id", "conversation", "background")


@dataclass(frozen=True, slots=True)
class Keeping:
    """The place to keep a response at its end. `items`: all items that it answers; `own`: those of its body."""

    kept: Kept
    stores: bool
    items: bytes
    own: bytes
    conversation: str | None

    async def end(self, response: Mapping[str, Any]) -> bool:
        """Keep the response. Returns whether it is kept; a failure does not fail the answer."""
        if self.conversation:
            said = [*orjson.loads(self.own), *response["output"]]
            try:
                await self.kept.add(self.conversation, [orjson.dumps(item) for item in said])
            except GatewayError as error:
                log.warning("a conversation lacks a turn", conversation=self.conversation, error=error.message)
                return False
        return self.stores and await self.kept.keep(response, self.items)


def kept_of(shared: Shared, owner: str) -> Kept | None:
    return Kept(shared.store, owner, MAX_KEPT_BYTES, KEPT_S) if shared.store else None


async def recalled(llm: LLM, body: Incoming[ResponseBody]) -> tuple[bytes | None, Keeping | None]:
    """Returns the body with all items that it continues (None: its own alone), and where its response is kept.

    Raises GatewayError.
    """
    found, kept = body.body, kept_of(llm.shared, body.owner)
    read = body.reduced.items if body.reduced else None
    conversation = _conversation(found)
    if kept is None:
        _refuse_what_needs_store(found)
        return None, None
    if conversation and found.previous_response_id:
        raise InvalidRequest("conversation and previous_response_id exclude each other", "conversation")
    own = items_of(found.input, llm.shared.new_id()) if read is None else read
    before = await _before(kept, found, conversation)
    if read is None:
        own = await _resolved(kept, own)
    items = joined_lists([before, own]) if before else own
    if conversation and len(items) > kept.most_bytes:
        said = f"{conversation} would have more than {kept.most_bytes} bytes with this turn"
        raise InvalidRequest(f"conversation: {said}", "conversation", "conversation_full")
    stores = found.store is not False
    keeping = Keeping(kept, stores, items, own, conversation) if stores or conversation else None
    if not before and not _refers(found.input):
        return None, keeping
    fields = found.model_dump(exclude_unset=True, exclude={"previous_response_id", "conversation", "input"})
    return orjson.dumps({**fields, "input": orjson.Fragment(items)}), keeping


def items_of(said: Any, unique: str) -> bytes:
    """Returns the items of `input` as a JSON list, each with an id; values that are no items are left unchanged.

    Made ids contain `unique`, so that a text sent twice is two items.
    """
    items = [{"type": "message", "role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list):
        return b"[]"
    try:
        return orjson.dumps([_named(item, f"{unique}{i}") for i, item in enumerate(items)])
    except TypeError as error:
        raise InvalidRequest(f"input: {error}", "input") from None


def _named(item: Any, unique: str) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = {"type": "output_text" if item.get("role") == "assistant" else "input_text", "text": content}
        item = {**item, "content": [part | ({"annotations": []} if part["type"] == "output_text" else {})]}
    prefix = PREFIXES.get(kind, "item") if isinstance(kind, str) else "item"
    said = item.get("id")
    return {"type": kind, "status": "completed", **item, "id": said if said else f"{prefix}_{unique}"}


async def _before(kept: Kept, found: ResponseBody, conversation: str | None) -> bytes:
    if found.previous_response_id:
        return await kept.behind(found.previous_response_id)
    if conversation:
        try:
            _, *items = await kept.conversation(conversation)
        except NotKept as error:
            raise InvalidRequest(f"conversation: {error.message}", "conversation", "conversation_not_found") from None
        return b"[" + b",".join(items) + b"]"
    return b""


def _refers(said: Any) -> bool:
    return isinstance(said, list) and any(_is_reference(item) for item in said)


def _is_reference(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") == "item_reference"


async def _resolved(kept: Kept, items: bytes) -> bytes:
    """Returns items with references replaced by the items that they name, within the size of a kept response.

    Raises GatewayError.
    """
    if b'"item_reference"' not in items:
        return items
    made = orjson.loads(items)
    references = [(i, str(item.get("id"))) for i, item in enumerate(made) if _is_reference(item)]
    if len(references) > MOST_REFERENCES:
        raise InvalidRequest(f"input: at most {MOST_REFERENCES} item_references, got {len(references)}", "input")
    found: dict[str, bytes] = {}
    num_bytes = len(items)
    for i, name in references:
        where = f"input[{i}].id"
        if name not in found:
            try:
                found[name] = await kept.item(name)
            except NotKept as error:
                raise InvalidRequest(f"{where}: {error.message}", where, "item_not_found") from None
        num_bytes += len(found[name])
        if num_bytes > kept.most_bytes:
            said = f"input has more than {kept.most_bytes} bytes with what it refers to"
            raise InvalidRequest(f"{where}: {said}", where, "body_too_large")
        made[i] = orjson.Fragment(found[name])
    return orjson.dumps(made)


def _conversation(found: ResponseBody) -> str | None:
    match found.conversation:
        case None:
            return None
        case str(name) | {"id": str(name)}:
            return name
    raise InvalidRequest("conversation must be an id, or an object with an id", "conversation")


def _refuse_what_needs_store(found: ResponseBody) -> None:
    said: Sequence[str] = [name for name in NEEDS_STORE if getattr(found, name)]
    if said:
        why = f"{said[0]}: this server keeps no responses: its store-url is not set"
        raise InvalidRequest(why, said[0], "unsupported_parameter")
