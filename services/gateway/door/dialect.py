"""A protocol's own form of errors, of the request's id, and of a stream's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.gateway.errors import GatewayError


class Dialect:
    """OpenAI's; another protocol's is a subclass."""

    id_header = "x-request-id"
    done = b"data: [DONE]\n\n"
    ping = b": waiting\n\n"  # a comment that no client shows, for streams that are silent

    def status(self, error: GatewayError) -> int:
        return error.status

    def body(self, error: GatewayError, request_id: str, status: int = 0) -> dict[str, Any]:
        """Returns the body of an error. `status`: instead of the error's own."""
        return error.body()

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        """Returns the last event of a stream whose answer has not begun."""
        return b"data: %b\n\n" % orjson.dumps(self.body(error, request_id))

    def headers(self, said: Mapping[str, str]) -> Mapping[str, str]:
        return said


class ResponsesDialect(Dialect):
    """The dialect of /v1/responses, whose events have a type."""

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        said = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return b"event: error\ndata: %b\n\n" % orjson.dumps({"type": "error", **said, "sequence_number": 0})


OPENAI = Dialect()
RESPONSES = ResponsesDialect()
