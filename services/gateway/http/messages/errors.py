"""Errors as Anthropic words them: {"type": "error", "error": {"type", "message"}, "request_id"}.

Overloaded is 529 overloaded_error, RateLimited stays 429 rate_limit_error; other statuses are the gateway's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import GatewayError, Overloaded
from services.gateway.http.dialect import Dialect

OVERLOADED = 529
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class Anthropic(Dialect):
    id_header = "request-id"
    done = b""

    def status(self, error: GatewayError) -> int:
        return OVERLOADED if isinstance(error, Overloaded) else error.status

    def body(self, error: GatewayError, request_id: str) -> dict[str, Any]:
        status = self.status(error)
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


ANTHROPIC = Anthropic()
