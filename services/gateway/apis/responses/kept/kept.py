"""Kept responses and conversations. Owners cannot see each other's.

response       a record: `response`, `items` (all that it answers), `output`; one more for each item of its output
conversation   a list: itself, then its items
background     beside its response: a list of events, and marks that its gateway lives, and that it was cancelled
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import orjson
import structlog

from services.gateway.errors import InvalidRequest, NotKept, Unavailable
from tandem.store import Store, StoreUnavailable

log = structlog.get_logger(__name__)
# Kinds of items.
MOST_OF_PAGE, SOME_OF_PAGE = 100, 20
# Forms of ids of kept things, by kind.
RESPONSE, CONVERSATION = re.compile("resp_[0-9A-Za-z_-]{1,128}"), re.compile("conv_[0-9A-Za-z_-]{1,128}")
ITEM = re.compile("(?!resp_|conv_)[a-z]{1,8}_[0-9A-Za-z_-]{1,128}")


def joined_lists(lists: Sequence[bytes]) -> bytes:
    """Returns several JSON lists joined."""
    return b"[" + b",".join(one[1:-1] for one in lists if len(one) > 2) + b"]"


class Kept:
    """The kept responses and conversations of one owner."""

    def __init__(self, store: Store, owner: str, most_bytes: int, ttl_s: int) -> None:
        self._store, self.most_bytes, self._ttl_s = store, most_bytes, ttl_s
        self._of = blake2b(owner.encode(errors="replace"), digest_size=12).hexdigest()

    async def response(self, response_id: str) -> bytes:
        """Raises NotKept | Unavailable."""
        (found,) = await self._fields(_checked(RESPONSE, response_id), "response")
        return found

    async def items_of(self, response_id: str) -> bytes:
        """Returns the JSON list of the items that a response answered. Raises NotKept | Unavailable."""
        (found,) = await self._fields(_checked(RESPONSE, response_id), "items")
        return found

    async def behind(self, response_id: str) -> bytes:
        """Returns the JSON list of items that a next response continues. Raises InvalidRequest | Unavailable."""
        try:
            return joined_lists(await self._fields(_checked(RESPONSE, response_id), "items", "output"))
        except NotKept as error:
            param = "previous_response_id"
            raise InvalidRequest(f"{param}: {error.message}", param, "previous_response_not_found") from None

    async def item(self, item_id: str) -> bytes:
        """Raises NotKept | Unavailable."""
        (found,) = await self._fields(_checked(ITEM, item_id), "item")
        return found

    async def keep(self, response: Mapping[str, Any], items: bytes) -> bool:
        """Keep a response. Returns False if it is too large or the store refuses it."""
        output = orjson.dumps(response["output"])
        fields = {"response": orjson.dumps(response), "items": items, "output": output}
        if sum(map(len, fields.values())) > self.most_bytes:
            return False
        try:
            for item in response["output"]:
                await self._store.write(self._key(item["id"]), {"item": orjson.dumps(item)}, self._ttl_s)
            await self._store.write(self._key(response["id"]), fields, self._ttl_s)
        except StoreUnavailable as error:
            log.warning("a response is not kept", response=response["id"], error=str(error))
            return False
        return True

    async def forget(self, response_id: str) -> None:
        """Delete a response with the items of its output. Raises NotKept | Unavailable."""
        (output,) = await self._fields(_checked(RESPONSE, response_id), "output")
        await self.cancel(response_id)  # if it is still being generated
        items = (item["id"] for item in orjson.loads(output))
        await self._delete(response_id, f"{response_id}:events", *items)

    async def forget_conversation(self, conversation_id: str) -> None:
        """Raises NotKept | Unavailable."""
        await self._delete(_checked(CONVERSATION, conversation_id))

    async def _delete(self, *names: str) -> None:
        with _reached():
            if not await self._store.delete(*map(self._key, names)):
                raise NotKept(names[0])

    async def beat(self, response_id: str, events: Sequence[bytes], ttl_s: int) -> None:
        """Mark a background response as alive, and append new events. Raises Unavailable."""
        with _reached():
            await self._store.write(self._key(f"{response_id}:alive"), {"is": b"1"}, ttl_s)
            if events:
                await self._store.begin(self._key(f"{response_id}:events"), events, self._ttl_s)

    async def is_alive(self, response_id: str) -> bool:
        """Raises Unavailable."""
        return await self._is_there(f"{response_id}:alive")

    async def cancel(self, response_id: str) -> None:
        """Raises Unavailable."""
        with _reached():
            await self._store.write(self._key(f"{response_id}:cancelled"), {"is": b"1"}, self._ttl_s)

    async def is_cancelled(self, response_id: str) -> bool:
        """Raises Unavailable."""
        return await self._is_there(f"{response_id}:cancelled")

    async def events(self, response_id: str, start: int) -> list[bytes]:
        """Returns the events from number `start` on. Raises Unavailable."""
        with _reached():
            return await self._store.entries(self._key(f"{response_id}:events"), start)

    async def _is_there(self, name: str) -> bool:
        try:
            await self._fields(name, "is")
        except NotKept:
            return False
        return True

    async def begin(self, conversation: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Raises Unavailable."""
        with _reached():
            entries = [orjson.dumps(one) for one in (conversation, *items)]
            await self._store.begin(self._key(conversation["id"]), entries, self._ttl_s)

    async def conversation(self, conversation_id: str) -> list[bytes]:
        """Returns a conversation and its items.

        Raises:
            InvalidRequest: it is full.
            NotKept | Unavailable
        """
        with _reached():
            found = await self._store.entries(self._key(_checked(CONVERSATION, conversation_id)))
        if not found:
            raise NotKept(conversation_id)
        if sum(map(len, found)) > self.most_bytes:
            raise InvalidRequest(f"conversation: {conversation_id} is full", "conversation", "conversation_full")
        return found

    async def add(self, conversation_id: str, items: Sequence[bytes]) -> None:
        """Raises NotKept | Unavailable."""
        with _reached():
            if items and not await self._store.append(self._key(conversation_id), items, self._ttl_s):
                raise NotKept(conversation_id)

    async def rename(self, conversation: Mapping[str, Any]) -> None:
        """Replace a conversation's metadata. Raises Unavailable."""
        with _reached():
            await self._store.replace_first(self._key(conversation["id"]), orjson.dumps(conversation))

    async def remove(self, conversation_id: str, item: bytes) -> None:
        """Raises Unavailable."""
        with _reached():
            await self._store.remove(self._key(conversation_id), item)

    async def _fields(self, name: str, *fields: str) -> list[bytes]:
        with _reached():
            found = await self._store.read(self._key(name), *fields)
        if found is None:
            raise NotKept(name)
        return found

    def _key(self, name: str) -> str:
        return f"{self._of}:{name}"


def _checked(kind: re.Pattern[str], name: str) -> str:
    """Raises NotKept: the name is no id of this kind."""
    if not kind.fullmatch(name):
        raise NotKept(name)
    return name


@contextmanager
def _reached() -> Iterator[None]:
    """Translate errors of the store. Raises Unavailable."""
    try:
        yield
    except StoreUnavailable as error:
        raise Unavailable(f"what is kept cannot be reached: {error}", code="store_unavailable") from None


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of items, newest first unless `order` is asc. Raises InvalidRequest."""
    order, after, said = query.get("order", "desc"), query.get("after"), query.get("limit", str(SOME_OF_PAGE))
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order!r}", "order")
    if not said.isascii() or not said.isdigit() or not 1 <= (limit := int(said[:4])) <= MOST_OF_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MOST_OF_PAGE}, got {said!r}", "limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after: no item has the id {after!r}", "after")
        ordered = ordered[ids.index(after) + 1 :]
    shown = ordered[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else ("", "")
    return {
        "object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(ordered) > len(shown)
    }  # fmt: skip
