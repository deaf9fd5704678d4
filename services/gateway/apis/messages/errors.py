"""Errors in Anthropic's form: {"type": "error", "error": {"type", "message"}, "request_id"}.

Overloaded is 529 overloaded_error, RateLimited stays 429 rate_limit_error; other statuses are the gateway's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from services.gateway.apis.messages.schema import NO_THREADS
from services.gateway.door import Dialect
from services.gateway.errors import GatewayError, Overloaded

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
# OpenAI's rate-limit headers are x-ratelimit-WHAT-OF, Anthropic's anthropic-ratelimit-OF-WHAT.
LIMITS = "x-ratelimit-"


class Anthropic(Dialect):
    id_header = "request-id"
    done = b""
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, wall: Callable[[], float]) -> None:
        """`wall`: returns Unix seconds."""
        self._wall = wall

    def status(self, error: GatewayError) -> int:
        return status_of(error)

    def body(self, error: GatewayError, request_id: str, status: int = 0) -> dict[str, Any]:
        return error_body(error, request_id, status or status_of(error))

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        return b"event: error\n" + super().failure(error, request_id)

    def headers(self, said: Mapping[str, str]) -> Mapping[str, str]:
        worded = (self._header(*item) if item[0].startswith(LIMITS) else item for item in said.items())
        return dict(worded)

    def _header(self, name: str, value: str) -> tuple[str, str]:
        what, _, kind = name.removeprefix(LIMITS).partition("-")
        if what == "reset":
            at = datetime.fromtimestamp(self._wall() + float(value.removesuffix("s")), UTC)
            value = at.isoformat(timespec="seconds").replace("+00:00", "Z")
        return f"anthropic-ratelimit-{kind}-{what}", value


def status_of(error: GatewayError) -> int:
    return OVERLOADED if isinstance(error, Overloaded) else error.status


def error_body(error: GatewayError, request_id: str, status: int) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    said: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        said["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": said, "request_id": request_id}
