"""Reads the details of the cluster's errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from tandem_client.stubs.error_details_pb2 import BadRequest, ErrorInfo, Status

DETAILS = "grpc-status-details-bin"
M = TypeVar("M", bound=Message)


def field_violations(error: grpc.RpcError) -> dict[str, str]:
    """Faults of a request by field; empty where no field is."""
    wrong = _details(error, "google.rpc.BadRequest", BadRequest)
    return {violation.field: violation.description for one in wrong for violation in one.field_violations}


def error_code(error: grpc.RpcError) -> str:
    """The cluster's own name of the fault, such as model_not_found; empty where the cluster did not answer."""
    return next((info.reason for info in _details(error, "google.rpc.ErrorInfo", ErrorInfo)), "")


def retry_after_s(error: grpc.RpcError) -> float | None:
    """How long the cluster asks to be left alone, where it says so."""
    for name, value in _trailers(error):
        if name == "retry-after":
            try:
                return max(float(value), 0.0)
            except ValueError:
                return None
    return None


def _details(error: grpc.RpcError, name: str, kind: type[M]) -> Iterable[M]:
    for packed in (value for key, value in _trailers(error) if key == DETAILS):
        try:
            details = Status.FromString(packed).details
            yield from (kind.FromString(detail.value) for detail in details if detail.type_url.endswith(f"/{name}"))
        except DecodeError:
            return


def _trailers(error: grpc.RpcError) -> Iterable[tuple[str, Any]]:
    trailing_metadata: Any = getattr(error, "trailing_metadata", tuple)
    return trailing_metadata() or ()
