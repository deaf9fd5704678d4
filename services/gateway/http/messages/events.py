"""A message, whole or as events.

message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.errors import GatewayError
from services.gateway.generation import Answer, Delta
from services.gateway.http.format import Framing, ParsedBody
from services.gateway.http.messages.errors import ANTHROPIC
from tandem.v1 import llm_pb2


class MessageFrame(Framing):
    """One message: its events, or all of it at once."""

    def __init__(self, found: ParsedBody, answer: Answer, created: int) -> None:
        self._answer = answer
        self._begun = False
        self._most = found.max_tokens_said

    def chunk(self, delta: Delta) -> bytes:
        events = b"" if self._begun else self._begin()
        if delta.text:
            events += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        if delta.finish_reason:
            events += _event("content_block_stop", index=0)
            events += _event("message_delta", delta=self._end(delta), usage=self._usage())
            events += _event("message_stop")
        return events

    def shows(self, delta: Delta) -> bool:
        return not self._begun or bool(delta.text or delta.finish_reason)

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
        content = [{"type": "text", "text": delta.text, "citations": None}] if delta.text else []
        return self._message(content) | self._end(delta)

    def _begin(self) -> bytes:
        self._begun = True
        block = {"type": "text", "text": "", "citations": None}
        return _event("message_start", message=self._message([])) + _event(
            "content_block_start", index=0, content_block=block
        )

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
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        used = self._answer.usage
        return {
            "input_tokens": used.prompt_tokens - used.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": used.cached_tokens,
            "output_tokens": used.completion_tokens,
        }


def _event(kind: str, **said: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **said}))
