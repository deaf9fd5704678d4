"""The items of a response, and the events of its stream.

    created, in_progress                                      at once, before the prompt is computed
    for each item    output_item.added, what it says, output_item.done
    completed | incomplete | error, failed

Every event has the next sequence number. An item keeps its id and place from `added` to `completed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.apis.openai.envelope import usage
from services.gateway.apis.responses.items import Item, Message, Said, TextItem, Thoughts, ToolCall, item_of_call
from services.gateway.apis.responses.kept.recalling import Keeping
from services.gateway.apis.responses.tools import Tool
from services.gateway.door import Framing, ParsedBody
from services.gateway.errors import GatewayError
from services.gateway.generation import Answer, Delta
from services.gateway.tools import CallPart
from tandem.v1 import llm_pb2


class ResponseEvents(Framing):
    """One response: its events, or all of it at once."""

    def __init__(
        self, new_id: Callable[[], str], echo: Mapping[str, Any], tools: Mapping[str, Tool],
        keeping: Keeping | None, found: ParsedBody, answer: Answer, created: int,
    ) -> None:  # fmt: skip
        """`tools`: callable tools by their names in the chat."""
        self._new_id, self._unique = new_id, new_id()
        self._answer, self._tools, self._reading, self._keeping = answer, tools, found.reading, keeping
        frame = {"id": self.id, "object": "response", "created_at": created}
        self._frame = {**frame, "model": answer.request.model.name, **echo}
        self._items: list[Item] = []
        self._is_open = False  # the last item is still being written
        self._whole_calls: set[int] = set()
        self._number = 0
        self._is_cut = self.is_kept = False

    @property
    def id(self) -> str:
        return f"resp_{self._unique}"

    def begin(self) -> bytes:
        if self._number:
            return b""
        found = self.response("in_progress")
        return b"".join(self._event(name, {"response": found}) for name in ("created", "in_progress"))

    def shows(self, delta: Delta) -> bool:
        return delta.says_something or bool(delta.calls)

    def chunk(self, delta: Delta) -> bytes:
        """Returns the events of a delta."""
        said = self.begin()
        self._whole_calls |= {call.index for call in delta.calls}
        if delta.reasoning:
            said += self._grow(Thoughts, delta.reasoning)
        # Parts of the open call, which a text ends.
        going = [part for part in delta.call_parts if part.index == self._open_call]
        said += b"".join(map(self._call, going))
        if delta.text:
            said += self._grow(Message, delta.text)
        said += b"".join(self._call(part) for part in delta.call_parts if part not in going)
        if self._open_call in self._whole_calls:
            said += self._done("completed")
        if delta.finish_reason:
            said += self._end(delta)
        return said

    async def last(self) -> bytes:
        """Returns the event that the response is complete, or was cut off."""
        found = await self._kept()
        return self._event(found["status"], {"response": found})

    def failure(self, error: GatewayError) -> bytes:
        """Returns the events that end the stream of a failed answer."""
        said = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self._event("error", said, "") + self._event("failed", {"response": self._failed(error)})

    async def keep_failed(self, error: GatewayError) -> None:
        """Keep the failed response, for clients that ask later."""
        if self._keeping:
            await self._keeping.kept.keep(self._failed(error), self._keeping.items)

    def _failed(self, error: GatewayError) -> dict[str, Any]:
        why = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
        return {**self.response("failed"), "error": why}

    def gathered(self, choices: Sequence[Sequence[Delta]]) -> Sequence[Delta]:
        """Returns all deltas in their order, so that a whole answer has the same items as its stream."""
        return [delta for choice in choices for delta in choice]

    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        for delta in deltas:
            self.chunk(delta)
        return await self._kept()

    async def _kept(self) -> dict[str, Any]:
        """Returns the response at its end. Its `store` is true only if it was kept."""
        found = self.response("incomplete" if self._is_cut else "completed")
        if self._keeping:
            self.is_kept = found["store"] = await self._keeping.end(found)
        return found

    @property
    def _open_call(self) -> int | None:
        """The index of the call that is being written; None if none is."""
        item = self._items[-1] if self._is_open else None
        return item.index if isinstance(item, ToolCall) else None

    def _grow(self, kind: type[TextItem], text: str) -> bytes:
        said = b""
        if not self._is_open or not isinstance(self._items[-1], kind):
            said = self._added(kind(f"{kind.prefix}_{self._unique}{len(self._items)}"))
        return said + self._events(self._items[-1].grow(text))

    def _call(self, part: CallPart) -> bytes:
        said = b""
        if part.index != self._open_call:
            assert self._reading is not None  # calls need one
            name = f"{self._unique}{len(self._items)}"
            call_id = self._reading.call_id(self._new_id())
            said = self._added(item_of_call(self._tools.get(part.name), name, call_id, part.index, part.name))
        return said + self._events(self._items[-1].grow(part.arguments))

    def _end(self, delta: Delta) -> bytes:
        """Returns the events of an answer's end. An empty answer is a message without text."""
        self._is_cut = delta.finish_reason == llm_pb2.FINISH_REASON_LENGTH
        said = b"" if self._items else self._added(Message(f"msg_{self._unique}0"))
        if self._open_call is not None and self._open_call not in self._whole_calls:
            return said
        return said + self._done("incomplete" if self._is_cut else "completed")

    def _added(self, item: Item) -> bytes:
        """Returns the events that begin an item. An incomplete call before it was text and is not ended."""
        is_text = self._open_call is not None and self._open_call not in self._whole_calls
        said = b"" if is_text else self._done("completed")
        self._items.append(item)
        self._is_open = True
        added = self._event("output_item.added", {"output_index": len(self._items) - 1, "item": item.empty()})
        return said + added + self._events(item.begin())

    def _done(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        item = self._items[-1]
        item.status = status
        said = self._events(item.end())
        self._is_open = False
        return said + self._event("output_item.done", {"output_index": len(self._items) - 1, "item": item.json()})

    def _events(self, said: Iterable[Said]) -> bytes:
        """Returns the events of the last item."""
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return b"".join(self._event(kind, {**place, **fields}) for kind, fields in said)

    def _event(self, kind: str, said: Mapping[str, Any], prefix: str = "response.") -> bytes:
        name = prefix + kind
        event = orjson.dumps({"type": name, "sequence_number": self._number, **said})
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + event + b"\n\n"

    def response(self, status: str) -> dict[str, Any]:
        """Returns the response as far as it has been generated."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = status in ("completed", "incomplete")
        beside = {"status": status, "error": None, "incomplete_details": cut}
        output = [item.json() for item in self._items if not (item.runs_on and item.status == "in_progress")]
        return {**self._frame, **beside, "output": output, "usage": self._usage() if ended else None}

    def _usage(self) -> dict[str, Any]:
        """Returns usage. Prompt tokens that were not cached count as written to the cache."""
        found = usage(self._answer)
        prompt, cached = found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": max(0, prompt - cached)},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": found["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": found["total_tokens"],
            "tandem": found["tandem"],
        }
