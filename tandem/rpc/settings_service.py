"""A gRPC service that changes its process's settings for a limited time."""

from __future__ import annotations

import json
from typing import Any

import grpc
from grpc import aio

from tandem.process import RunningSettings
from tandem.rpc.endpoints import Refused, Servicer
from tandem.v1 import process_pb2, process_pb2_grpc

MAX_BYTES, MAX_NAME = 64 * 1024, 256


class SettingsService(process_pb2_grpc.SettingsServiceServicer):
    def __init__(self, running: RunningSettings[Any]) -> None:
        self._running = running
        self.servicer = Servicer(
            "tandem.v1.SettingsService", self, process_pb2_grpc.add_SettingsServiceServicer_to_server
        )

    async def Override(
        self, request: process_pb2.OverrideRequest, context: aio.ServicerContext[Any, Any]
    ) -> process_pb2.OverrideResponse:
        try:
            if changes := _changes_of(request):
                by = f"{request.by or 'anyone'}, from {context.peer()}"
                self._running.override(changes, request.ttl_s, by)
        except (ValueError, RecursionError) as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"settings: {error}") from None
        return process_pb2.OverrideResponse(in_force=json.dumps(self._running.report()))


def _changes_of(request: process_pb2.OverrideRequest) -> dict[str, Any]:
    """Returns the settings that a request changes.

    Raises:
        ValueError: the request is malformed.
    """
    if len(request.settings) > MAX_BYTES or len(request.by) > MAX_NAME:
        raise ValueError(f"longer than {MAX_BYTES} characters, or `by` than {MAX_NAME}")
    changes = json.loads(request.settings or "{}")
    if not isinstance(changes, dict):
        raise ValueError("must be a JSON object")
    return changes
