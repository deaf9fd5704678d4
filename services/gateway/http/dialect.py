"""A protocol's own words around an answer: errors, the request's id, the end of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import GatewayError


class Dialect:
    """OpenAI's; another protocol's is a subclass."""

    id_header = "x-request-id"
    done = b"data: [DONE]\n\n"
    ping = b""  # an event that says nothing, for a stream that has been silent for long

    def status(self, error: GatewayError) -> int:
        return error.status

    def body(self, error: GatewayError, request_id: str, status: int = 0) -> dict[str, Any]:
        """`status`: another than the error's own."""
        return error.body()

    def headers(self, said: Mapping[str, str]) -> Mapping[str, str]:
        return said


OPENAI = Dialect()
