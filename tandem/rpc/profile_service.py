"""A gRPC service that profiles its process."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio

from tandem.process import Profiler
from tandem.rpc.endpoints import Refused, Servicer
from tandem.v1 import process_pb2, process_pb2_grpc


class ProfileService(process_pb2_grpc.ProfileServiceServicer):
    def __init__(self, name: str) -> None:
        self._name, self._profiler = name, Profiler()
        self.servicer = Servicer(
            "tandem.v1.ProfileService", self, process_pb2_grpc.add_ProfileServiceServicer_to_server
        )

    async def Profile(
        self, request: process_pb2.ProfileRequest, context: aio.ServicerContext[Any, Any]
    ) -> process_pb2.ProfileResponse:
        try:
            made = await asyncio.to_thread(self._profiler.profile, request.seconds, self._name)
        except ValueError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except RuntimeError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        return process_pb2.ProfileResponse(speedscope=made)
