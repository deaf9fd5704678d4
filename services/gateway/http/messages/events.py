"""A message, whole or as events.

message_start
content_block_start, content_block_delta ..., content_block_stop   for each block
message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.errors import GatewayError
from services.gateway.generation import Answer, Delta
from services.gateway.http.format import Framing, ParsedBody
from services.gateway.http.messages.errors import ANTHROPIC
from services.gateway.tools import CallPart, parsed
from tandem.v1 import llm_pb2

TEXT = "text"


class MessageFrame(Framing):
    """One message: its events, or all of it at once."""

    def __init__(self, new_id: Callable[[], str], found: ParsedBody, answer: Answer, created: int) -> None:
        self._answer, self._new_id, self._reading = answer, new_id, found.reading
        self._begun = self._called = False
        self._num_blocks = 0
        self._open: int | str | None = None  # a call's index, or that it is text
        self._most = found.max_tokens_said

    def chunk(self, delta: Delta) -> bytes:
        events = b"" if self._begun else self._begin()
        before = [part for part in delta.call_parts if part.index == self._open]  # text ends its block
        events += b"".join(map(self._call_part, before))
        if delta.text:
            events += self._block(TEXT, {"type": "text", "text": "", "citations": None})
            events += self._delta("text_delta", text=delta.text)
        events += b"".join(self._call_part(part) for part in delta.call_parts if part not in before)
        if delta.finish_reason:
            events += self._stop()
            events += _event("message_delta", delta=self._end(delta), usage=self._usage())
            events += _event("message_stop")
        return events

    def shows(self, delta: Delta) -> bool:
        return not self._begun or bool(delta.text or delta.call_parts or delta.finish_reason)

    def ends_with(self, delta: Delta) -> bool:
        return bool(delta.finish_reason)

    def last(self) -> bytes:
        """Nothing: the last delta has said all."""
        return b""

    def failure(self, error: GatewayError) -> bytes:
        said = ANTHROPIC.body(error, self._answer.request.request_id)
        return b"event: error\ndata: %b\n\n" % orjson.dumps(said)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        (delta,) = deltas
        content: list[dict[str, Any]] = []
        if delta.text:
            content.append({"type": "text", "text": delta.text, "citations": None})
        for call in delta.calls:
            content.append({**self._tool_use(call.name), "input": _input(call.arguments)})
        return self._message(content) | self._end(delta)

    def _begin(self) -> bytes:
        self._begun = True
        return _event("message_start", message=self._message([]))

    def _call_part(self, part: CallPart) -> bytes:
        begin = self._block(part.index, self._tool_use(part.name)) if part.name else b""
        return begin + self._delta("input_json_delta", partial_json=part.arguments)

    def _tool_use(self, name: str) -> dict[str, Any]:
        assert self._reading is not None  # or there were no call
        self._called = True
        return {"type": "tool_use", "id": self._reading.call_id(self._new_id()), "name": name, "input": {}}

    def _block(self, kind: int | str, content: Mapping[str, Any]) -> bytes:
        """Its begin, unless it is the one that is open."""
        if self._open == kind:
            return b""
        stop = self._stop()
        self._open = kind
        return stop + _event("content_block_start", index=self._num_blocks, content_block=content)

    def _delta(self, kind: str, **said: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta={"type": kind, **said})

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open, self._num_blocks = None, self._num_blocks + 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._answer.request
        return {
            "id": f"msg_{request.request_id}", "type": "message", "role": "assistant", "model": request.model.name,
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip

    def _end(self, delta: Delta) -> dict[str, Any]:
        """An answer that the context has cut off before its own max_tokens says so."""
        if delta.finish_reason == llm_pb2.FINISH_REASON_LENGTH:
            whole = self._answer.usage.completion_tokens >= (self._most or 0)
            return {"stop_reason": "max_tokens" if whole else "model_context_window_exceeded", "stop_sequence": None}
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        return {"stop_reason": "tool_use" if self._called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        used = self._answer.usage
        return {
            "input_tokens": used.prompt_tokens - used.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": used.cached_tokens,
            "output_tokens": used.completion_tokens,
        }


def _input(arguments: str) -> dict[str, Any]:
    """A call that a model has written wrongly is still one: its client is told what it says."""
    found = parsed(arguments)
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}


def _event(kind: str, **said: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **said}))
