"""The items of a response, and the events of its stream.

    created, in_progress
    for each item    output_item.added, content_part.added, delta ..., done, content_part.done, output_item.done
    completed | incomplete | error, failed

Every event has the next sequence number. An item keeps its id and place from `added` to `completed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.gateway.errors import GatewayError
from services.gateway.generation import Answer, Delta
from services.gateway.http.format import Framing, ParsedBody, usage
from services.gateway.http.responses.items import Item, Message, Thoughts
from tandem.v1 import llm_pb2


class ResponseEvents(Framing):
    """One response: its events, or all of it at once."""

    def __init__(self, unique: str, echo: Mapping[str, Any], found: ParsedBody, answer: Answer, created: int) -> None:
        self._answer, self._unique = answer, unique
        frame = {"id": f"resp_{unique}", "object": "response", "created_at": created}
        self._frame = {**frame, "model": answer.request.model.name, **echo}
        self._items: list[Item] = []
        self._number = 0
        self._is_cut = False

    def shows(self, delta: Delta) -> bool:
        return delta.says_something

    def ends_with(self, delta: Delta) -> bool:
        return bool(delta.finish_reason)

    def chunk(self, delta: Delta) -> bytes:
        """The events that a delta makes."""
        said = self._begin() if not self._number else b""
        for kind, text in ((Thoughts, delta.reasoning), (Message, delta.text)):
            if text:
                said += self._grow(kind, text)
        if delta.finish_reason:
            said += self._end_item(delta)
        return said

    def last(self) -> bytes:
        """Says that the response is whole, or was cut off."""
        found = self._response("incomplete" if self._is_cut else "completed")
        return self._event(f"response.{found['status']}", {"response": found})

    def failure(self, error: GatewayError) -> bytes:
        """A stream's end where the answer failed."""
        said = {"code": error.code or error.type, "message": error.message, "param": error.param}
        why = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
        found = {**self._response("failed"), "error": why}
        return self._event("error", said) + self._event("response.failed", {"response": found})

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        for delta in deltas:  # of one choice, that are one
            self.chunk(delta)
        return self._response("incomplete" if self._is_cut else "completed")

    def _begin(self) -> bytes:
        found = self._response("in_progress")
        return b"".join(self._event(f"response.{name}", {"response": found}) for name in ("created", "in_progress"))

    def _grow(self, kind: type[Item], text: str) -> bytes:
        said = b""
        if not self._items or not isinstance(self._items[-1], kind):
            said = self._done("completed") + self._added(kind)
        item = self._items[-1]
        item.texts.append(text)
        return said + self._of_part(f"response.{kind.event}.delta", {"delta": text, **kind.beside})

    def _end_item(self, delta: Delta) -> bytes:
        """An answer that says nothing is a message without text."""
        self._is_cut = delta.finish_reason == llm_pb2.FINISH_REASON_LENGTH
        said = b"" if self._items else self._added(Message)
        return said + self._done("incomplete" if self._is_cut else "completed")

    def _added(self, kind: type[Item]) -> bytes:
        at = len(self._items)
        self._items.append(item := kind(f"{kind.prefix}_{self._unique}{at}"))
        added = self._event("response.output_item.added", {"output_index": at, "item": item.json(with_content=False)})
        return added + self._of_part("response.content_part.added", {"part": item.part("")})

    def _done(self, status: str) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        item.status = status
        text = "".join(item.texts)
        done = self._of_part(f"response.{item.event}.done", {"text": text, **item.beside})
        done += self._of_part("response.content_part.done", {"part": item.part(text)})
        place = len(self._items) - 1
        return done + self._event("response.output_item.done", {"output_index": place, "item": item.json()})

    def _of_part(self, kind: str, said: Mapping[str, Any]) -> bytes:
        """An event of the last item's only part."""
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, {**place, **said})

    def _event(self, kind: str, said: Mapping[str, Any]) -> bytes:
        event = orjson.dumps({"type": kind, "sequence_number": self._number, **said})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = status in ("completed", "incomplete")
        beside = {"status": status, "error": None, "incomplete_details": cut}
        output = [item.json() for item in self._items]
        return {**self._frame, **beside, "output": output, "usage": self._usage() if ended else None}

    def _usage(self) -> dict[str, Any]:
        """Tokens written to the cache: those of the prompt that were not there."""
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
