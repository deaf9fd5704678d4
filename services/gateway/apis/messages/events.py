"""A message, whole or as events.

message_start
content_block_start, content_block_delta ..., content_block_stop   for each block
message_delta, message_stop

A tool's input is sent in one piece once its call is complete, so that it is JSON and the same as in a whole
message; with `eager_input_streaming` it is sent as it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from services.gateway.apis.messages.errors import error_body, status_of
from services.gateway.apis.messages.turns import CALL_ID
from services.gateway.door import Framing, ParsedBody
from services.gateway.errors import GatewayError
from services.gateway.generation import Answer, Delta
from services.gateway.tools import Call, CallPart, parsed
from tandem.v1 import llm_pb2

TEXT, THINKING = "text", "thinking"
INVALID = "INVALID_JSON"


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """The form of the answer that a body asks for."""

    max_tokens: int  # as the body has it, before clipping
    caches: bool  # the body has `cache_control`
    hides_thoughts: bool
    eager: frozenset[str]  # tools whose input is streamed as it is written
    manages_context: bool
    block_size: int  # tokens of a KV block


class MessageFrame(Framing):
    """One message: its events, or all of it at once."""

    def __init__(
        self, new_id: Callable[[], str], said: MessageOptions, found: ParsedBody, answer: Answer, created: int
    ) -> None:
        self._answer, self._new_id, self._reading = answer, new_id, found.reading
        self._said = said
        self._begun = False
        self._num_blocks = 0
        self._open: int | str | None = None  # the open block: a call's index, TEXT or THINKING
        self._written: set[int] = set()  # calls that are sent as they are written

    def chunk(self, delta: Delta) -> bytes:
        events = b"" if self._begun else self._begin()
        if delta.reasoning:
            events += self._think(delta.reasoning)
        parts = [part for part in delta.call_parts if self._comes_as_written(part)]
        before = [part for part in parts if part.index == self._open]  # parts of the open call, which a text ends
        events += b"".join(map(self._call_part, before))
        if delta.text:
            events += self._block(TEXT, {"type": TEXT, "text": ""})
            events += self._delta("text_delta", text=delta.text)
        events += b"".join(self._call_part(part) for part in parts if part not in before)
        events += b"".join(self._whole_call(call) for call in delta.calls if call.index not in self._written)
        if delta.finish_reason:
            events += self._stop()
            events += _event("message_delta", delta=self._end(delta), usage=self._usage(), **self._managed())
            events += _event("message_stop")
        return events

    def shows(self, delta: Delta) -> bool:
        if not self._begun or delta.text or delta.calls or delta.finish_reason:
            return True
        hidden = self._said.hides_thoughts and self._open == THINKING
        return bool(delta.reasoning and not hidden) or bool(self._said.eager and delta.call_parts)

    def failure(self, error: GatewayError) -> bytes:
        said = error_body(error, self._answer.request.request_id, status_of(error))
        return b"event: error\ndata: %b\n\n" % orjson.dumps(said)

    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        (delta,) = deltas
        content: list[dict[str, Any]] = []
        if delta.reasoning:
            shown = "" if self._said.hides_thoughts else delta.reasoning
            content.append({"type": THINKING, "thinking": shown, "signature": self._signature()})
        if delta.text:
            content.append({"type": TEXT, "text": delta.text})
        for call in delta.calls:
            content.append(self._tool_use(call.name) | {"input": orjson.Fragment(input_of(call.arguments))})
        return self._message(content) | self._end(delta) | self._managed()

    def _begin(self) -> bytes:
        self._begun = True
        return _event("message_start", message=self._message([]))

    def _think(self, thoughts: str) -> bytes:
        begin = self._block(THINKING, {"type": THINKING, "thinking": "", "signature": ""})
        return begin if self._said.hides_thoughts else begin + self._delta("thinking_delta", thinking=thoughts)

    def _comes_as_written(self, part: CallPart) -> bool:
        if part.name in self._said.eager:
            self._written.add(part.index)
        return part.index in self._written

    def _call_part(self, part: CallPart) -> bytes:
        begin = self._block(part.index, self._tool_use(part.name)) if part.name else b""
        return begin + self._delta("input_json_delta", partial_json=part.arguments)

    def _whole_call(self, call: Call) -> bytes:
        return self._call_part(CallPart(call.index, call.name, input_of(call.arguments)))

    def _tool_use(self, name: str) -> dict[str, Any]:
        assert self._reading is not None  # calls need one
        unique = self._reading.call_id(self._new_id()).removeprefix("call_")
        return {"type": "tool_use", "id": CALL_ID + unique, "name": name, "input": {}}

    def _block(self, kind: int | str, content: Mapping[str, Any]) -> bytes:
        """Returns the event that begins a block, unless it is open already."""
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
        signed = self._delta("signature_delta", signature=self._signature()) if self._open == THINKING else b""
        self._open, self._num_blocks = None, self._num_blocks + 1
        return signed + _event("content_block_stop", index=self._num_blocks - 1)

    def _signature(self) -> str:
        """Returns a signature, which proves nothing: clients drop thoughts without one."""
        return blake2b(self._answer.request.request_id.encode(), digest_size=16).hexdigest()

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._answer.request
        return {
            "id": f"msg_{request.request_id}", "type": "message", "role": "assistant", "model": request.model.name,
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip

    def _end(self, delta: Delta) -> dict[str, Any]:
        """Returns the stop reason; an answer cut off by the context rather than by max_tokens has its own."""
        if delta.finish_reason == llm_pb2.FINISH_REASON_LENGTH:
            whole = self._answer.usage.completion_tokens >= self._said.max_tokens
            return {"stop_reason": "max_tokens" if whole else "model_context_window_exceeded", "stop_sequence": None}
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        called = delta.finish_reason == llm_pb2.FINISH_REASON_TOOL_CALLS
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Returns usage.

        Whole blocks are always cached; they count as cache creation only if the body asks for caching.
        """
        used = self._answer.usage
        whole = used.prompt_tokens - used.prompt_tokens % self._said.block_size
        created = max(0, whole - used.cached_tokens) if self._said.caches else 0
        return {
            "input_tokens": used.prompt_tokens - used.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": used.cached_tokens,
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
        }

    def _managed(self) -> dict[str, Any]:
        return {"context_management": {"applied_edits": []}} if self._said.manages_context else {}


def input_of(arguments: str) -> str:
    """Returns a call's input as a JSON object; malformed arguments are put into one as text."""
    found = parsed(arguments)
    try:
        return json.dumps(found if isinstance(found, dict) else {INVALID: arguments}, allow_nan=False)
    except ValueError:  # infinite numbers such as 1e999
        return json.dumps({INVALID: arguments})


def _event(kind: str, **said: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **said}))
