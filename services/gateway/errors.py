"""Every way in which a request can fail, and what clients see of it.

    class              HTTP   error.type                gRPC
    InvalidRequest     400    invalid_request_error     INVALID_ARGUMENT
    Unauthorized       401    authentication_error      UNAUTHENTICATED
    Forbidden          403    permission_error          PERMISSION_DENIED
    ModelNotFound      404    invalid_request_error     NOT_FOUND
    NotKept            404    invalid_request_error     NOT_FOUND
    BodyTimeout        408    timeout                   DEADLINE_EXCEEDED
    BodyTooLarge       413    invalid_request_error     RESOURCE_EXHAUSTED
    UnsupportedEncoding 415   invalid_request_error     INVALID_ARGUMENT
    Poison             422    invalid_request_error     FAILED_PRECONDITION
    NotUpgraded        426    invalid_request_error     UNIMPLEMENTED
    Overloaded         429    overloaded_error          RESOURCE_EXHAUSTED
    RateLimited        429    rate_limit_error          RESOURCE_EXHAUSTED
    Internal           500    internal_error            INTERNAL
    Unavailable        503    service_unavailable       UNAVAILABLE
    TimedOut           504    timeout                   DEADLINE_EXCEEDED

A 429 says when to come back, as `retry-after`: a header, or a trailer of gRPC.

After the head of an answer, which a stream sends within a second, the HTTP status is spent: the same error then comes
as the stream's last event, `data: {"error": {...}}`, and no `[DONE]` follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
from types import MappingProxyType
from typing import Any, ClassVar

from grpc import StatusCode

MAX_MESSAGE_LENGTH = 2000


class GatewayError(Exception):
    """The typed failure of a request. `param`: the field at fault, if any."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    grpc: ClassVar[StatusCode] = StatusCode.INTERNAL
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.message = _shortened(message)
        super().__init__(self.message)  # shown in logs and traces
        self.param = None if param is None else _shortened(param)
        self.code = code

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def _shortened(text: str) -> str:
    """Returns a message that may quote a client, cut to a bounded length and valid Unicode."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:MAX_MESSAGE_LENGTH]}…"


class InvalidRequest(GatewayError):
    status, type, grpc = 400, "invalid_request_error", StatusCode.INVALID_ARGUMENT


class Unauthorized(GatewayError):
    status, type, grpc = 401, "authentication_error", StatusCode.UNAUTHENTICATED
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class Forbidden(GatewayError):
    status, type, grpc = 403, "permission_error", StatusCode.PERMISSION_DENIED


class ModelNotFound(GatewayError):
    status, type, grpc = 404, "invalid_request_error", StatusCode.NOT_FOUND


class NotKept(GatewayError):
    """Nothing of this name is kept for this caller: it never was, expired, or is another's."""

    status, type, grpc = 404, "invalid_request_error", StatusCode.NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not kept here", "id", "not_found")


class BodyTimeout(GatewayError):
    status, type, grpc = 408, "timeout", StatusCode.DEADLINE_EXCEEDED


class BodyTooLarge(GatewayError):
    status, type, grpc = 413, "invalid_request_error", StatusCode.RESOURCE_EXHAUSTED


class UnsupportedEncoding(GatewayError):
    status, type, grpc = 415, "invalid_request_error", StatusCode.INVALID_ARGUMENT
    headers = MappingProxyType({"accept-encoding": "gzip"})


class Poison(GatewayError):
    """Two workers crashed while they computed this request: it should not be retried."""

    status, type, grpc = 422, "invalid_request_error", StatusCode.FAILED_PRECONDITION

    def __init__(self, incarnations: Collection[str]) -> None:
        self.incarnations = incarnations
        died = ", ".join(incarnations)
        super().__init__(f"two workers have crashed while they computed this request: {died}", code="poison")


class NotUpgraded(GatewayError):
    status, type, grpc = 426, "invalid_request_error", StatusCode.UNIMPLEMENTED
    headers = MappingProxyType({"upgrade": "HTTP/1.1"})


class Overloaded(GatewayError):
    """The cluster cannot do it in time, or its queue is full. Nothing was begun."""

    status, type, grpc = 429, "overloaded_error", StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, code: str | None = None, wait_s: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.headers = {"retry-after": str(max(1, ceil(wait_s)))}


class RateLimited(GatewayError):
    """The tenant has used up one of its limits."""

    status, type, grpc = 429, "rate_limit_error", StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, code: str, wait_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message, code=code)
        self.headers = {**headers, "retry-after": str(max(1, ceil(wait_s)))}


class Internal(GatewayError):
    pass


def unexpected(request_id: str) -> Internal:
    """Returns the error to show for a bug, whose own text is for the log."""
    return Internal(f"internal error; the gateway's log tells more of request {request_id}")


class Unavailable(GatewayError):
    status, type, grpc = 503, "service_unavailable", StatusCode.UNAVAILABLE


class TimedOut(GatewayError):
    status, type, grpc = 504, "timeout", StatusCode.DEADLINE_EXCEEDED


class WorkerLost(Unavailable):
    """The worker failed this request, which another worker may serve.

    `ended`: its process may have died, perhaps of this request.
    """

    def __init__(self, worker_id: str, message: str, *, ended: bool = False) -> None:
        super().__init__(f"worker {worker_id}: {message}", code="worker_lost")
        self.worker_id = worker_id
        self.ended = ended


LOST = {
    StatusCode.UNAVAILABLE,
    StatusCode.CANCELLED,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.ABORTED,
    StatusCode.DATA_LOSS,
    StatusCode.UNIMPLEMENTED,
}
BY_STATUS: dict[StatusCode, type[GatewayError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.OUT_OF_RANGE: InvalidRequest,
    StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    StatusCode.DEADLINE_EXCEEDED: TimedOut,
}


def from_status(worker_id: str, code: StatusCode, message: str) -> GatewayError:
    """Returns the gateway's error for a worker's status."""
    if code in LOST:
        return WorkerLost(worker_id, message or code.name)
    return BY_STATUS.get(code, Internal)(f"worker {worker_id}: {message or code.name}")


def from_failure(worker_id: str, code: str, message: str) -> GatewayError:
    """Returns the gateway's error for a failure that a worker's stream reports."""
    return from_status(worker_id, StatusCode.__members__.get(code, StatusCode.INTERNAL), message)
