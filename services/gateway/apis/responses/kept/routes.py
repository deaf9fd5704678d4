"""Routes of kept responses, conversations, and their items."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.routing import Route

from services.gateway.apis.openai.schema import Body, validated
from services.gateway.apis.responses.kept.background import cancel, current, send_events
from services.gateway.apis.responses.kept.kept import MOST_OF_PAGE, SOME_OF_PAGE, Kept, page_of
from services.gateway.apis.responses.kept.recalling import items_of, kept_of
from services.gateway.apis.responses.schema import ConversationBody, ItemsBody, check_metadata
from services.gateway.bodies import LARGE
from services.gateway.door import Endpoint, Exchange
from services.gateway.errors import GatewayError, InvalidRequest, NotKept, TimedOut
from services.gateway.shared import Shared

MOST_ITEMS = 20  # added by one request


@dataclass(frozen=True, slots=True)
class Asked:
    kept: Kept
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    new_id: Callable[[], str]
    now: int

    @property
    def name(self) -> str:
        return self.path["name"]


Respond = Callable[[Asked], Awaitable[Any]]


class KeptEndpoint(Endpoint):
    """An endpoint for kept things of the caller, by method."""

    def __init__(self, shared: Shared, methods: Mapping[str, Respond], wall: Callable[[], float]) -> None:
        super().__init__(shared)
        self._methods, self._wall = methods, wall
        self._streams = methods.get("GET") is get_response

    async def _serve(self, exchange: Exchange) -> None:
        shared, scope = self._shared, exchange.scope
        client = shared.access.authenticate(exchange.headers)
        kept = kept_of(shared, shared.access.tenant(client, exchange.headers, "", "user"))
        try:
            with shared.deadlines.until(exchange.deadline(shared)):
                body = await exchange.body(LARGE, shared.deadlines)
                if kept is None:
                    raise NotKept(scope["path"].rstrip("/").rpartition("/")[2])
                query = _query(scope["query_string"])
                asked = Asked(kept, scope["path_params"], query, body, shared.new_id, int(self._wall()))
                if scope["method"] == "GET" and query.get("stream") == "true" and self._streams:
                    await send_events(exchange, kept, asked.name, _after(query))
                    return
                found = await self._methods["GET" if scope["method"] == "HEAD" else scope["method"]](asked)
                await exchange.json(200, found, {})
        except TimeoutError:
            await exchange.fail(TimedOut("the request's deadline passed"), {})
        except GatewayError as error:
            await exchange.fail(error, {})


def _query(said: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(said.decode("latin-1"), max_num_fields=16))
    except ValueError as error:
        raise InvalidRequest(f"the query is malformed: {error}") from None


def _after(query: Mapping[str, str]) -> int:
    said = query.get("starting_after", "")
    if said and not (said.isascii() and said.isdigit() and len(said) < 10):
        raise InvalidRequest(f"starting_after must be the number of an event, got {said!r}", "starting_after")
    return int(said) if said else -1


async def get_response(asked: Asked) -> Any:
    """Get a kept response, or a background one as far as it is; with `stream`, its events."""
    return await current(asked.kept, asked.name)


async def cancel_response(asked: Asked) -> Any:
    """Cancel a background response."""
    return await cancel(asked.kept, asked.name)


async def delete_response(asked: Asked) -> Any:
    """Delete a kept response."""
    await asked.kept.forget(asked.name)
    return {"id": asked.name, "object": "response", "deleted": True}


async def list_input(asked: Asked) -> Any:
    """List the items that a response answers."""
    return page_of(await _parsed(await asked.kept.items_of(asked.name)), asked.query)


async def create_conversation(asked: Asked) -> Any:
    """Begin a conversation."""
    body = validated(ConversationBody, asked.body or b"{}")
    check_metadata(body.metadata or {})
    made = {
        "id": f"conv_{asked.new_id()}", "object": "conversation", "created_at": asked.now,
        "metadata": body.metadata or {},
    }  # fmt: skip
    await asked.kept.begin(made, _items(body.items or [], asked))
    return made


async def get_conversation(asked: Asked) -> Any:
    """Get a conversation."""
    return orjson.Fragment((await asked.kept.conversation(asked.name))[0])


async def change_conversation(asked: Asked) -> Any:
    """Change a conversation's metadata."""
    body = validated(ConversationBody, asked.body)
    check_metadata(body.metadata or {})
    found = {**orjson.loads((await asked.kept.conversation(asked.name))[0]), "metadata": body.metadata or {}}
    await asked.kept.rename(found)
    return found


async def delete_conversation(asked: Asked) -> Any:
    """Delete a conversation with its items."""
    await asked.kept.forget_conversation(asked.name)
    return {"id": asked.name, "object": "conversation.deleted", "deleted": True}


async def list_items(asked: Asked) -> Any:
    """List a conversation's items."""
    return page_of(await _items_of(asked), asked.query)


async def add_items(asked: Asked) -> Any:
    """Add items to a conversation."""
    items = _items(validated(ItemsBody, asked.body).items, asked)
    if not items:
        raise InvalidRequest("items must not be empty", "items")
    await asked.kept.conversation(asked.name)
    await asked.kept.add(asked.name, [orjson.dumps(item) for item in items])
    return page_of(items, {"order": "asc"})


async def get_item(asked: Asked) -> Any:
    """Get one item of a conversation."""
    return await _item(asked)


async def delete_item(asked: Asked) -> Any:
    """Delete one item of a conversation; returns the conversation."""
    await asked.kept.remove(asked.name, orjson.dumps(await _item(asked)))
    return await get_conversation(asked)


async def _item(asked: Asked) -> Any:
    found = [item for item in await _items_of(asked) if item["id"] == asked.path["item"]]
    if not found:
        raise NotKept(asked.path["item"])
    return found[0]


async def _items_of(asked: Asked) -> list[Any]:
    _, *items = await asked.kept.conversation(asked.name)
    return await _parsed(b"[" + b",".join(items) + b"]")


async def _parsed(items: bytes) -> list[Any]:
    """Returns parsed items, at most MAX_KEPT_BYTES of them, parsed on a thread."""
    found: list[Any] = await asyncio.to_thread(orjson.loads, items)
    return found


def _items(said: Sequence[Any], asked: Asked) -> list[Any]:
    if len(said) > MOST_ITEMS:
        raise InvalidRequest(f"items: at most {MOST_ITEMS} at once, got {len(said)}", "items")
    for i, item in enumerate(said):
        if not isinstance(item, dict) or not isinstance(item.get("id") or "", str):
            raise InvalidRequest(f"items[{i}] must be an object whose id, if any, is a string", f"items[{i}]")
    found: list[Any] = orjson.loads(items_of(said, asked.new_id()))
    return found


class KeptName(StringConvertor):
    """The id of a response or conversation in a path, which is not the name of a route."""

    regex = "(?!input_tokens(?:/|$))[^/]+"


register_url_convertor("kept", KeptName())
NOT_KEPT = re.compile("/v1/(responses/(?!resp_|input_tokens$)|conversations/(?!conv_)).")
KEPT: Mapping[str, Mapping[str, Respond]] = {
    "/v1/responses/{name}": {"GET": get_response, "DELETE": delete_response},
    "/v1/responses/{name}/cancel": {"POST": cancel_response},
    "/v1/responses/{name}/input_items": {"GET": list_input},
    "/v1/conversations": {"POST": create_conversation},
    "/v1/conversations/{name}": {
        "GET": get_conversation, "POST": change_conversation, "DELETE": delete_conversation
    },
    "/v1/conversations/{name}/items": {"GET": list_items, "POST": add_items},
    "/v1/conversations/{name}/items/{item}": {"GET": get_item, "DELETE": delete_item},
}  # fmt: skip
# Their query parameters.
KEPT_BODIES: Mapping[Respond, type[Body]] = {
    create_conversation: ConversationBody, change_conversation: ConversationBody, add_items: ItemsBody
}  # fmt: skip
PAGE = {
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_OF_PAGE, "default": SOME_OF_PAGE},
    "after": {"type": "string"},
}
KEPT_QUERIES: Mapping[Respond, Mapping[str, Any]] = {
    get_response: {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    list_input: PAGE,
    list_items: PAGE,
}


def names_no_kept(path: str) -> bool:
    """True if a path looks like one of these routes but its id cannot exist."""
    return NOT_KEPT.match(path) is not None


def kept_routes(shared: Shared, wall: Callable[[], float]) -> Iterator[Route]:
    for path, methods in KEPT.items():
        path = path.replace("{name}", "{name:kept}")
        yield Route(path, KeptEndpoint(shared, methods, wall), methods=list(methods))
