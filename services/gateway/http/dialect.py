"""What protocols word in their own way around an answer: errors, the request's id, the end of a stream."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import GatewayError


class Dialect:
    """OpenAI's; another protocol's is a subclass."""

    id_header = "x-request-id"
    done = b"data: [DONE]\n\n"

    def status(self, error: GatewayError) -> int:
        return error.status

    def body(self, error: GatewayError, request_id: str) -> dict[str, Any]:
        return error.body()


OPENAI = Dialect()
