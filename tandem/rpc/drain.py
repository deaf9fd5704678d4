"""Draining at an orchestrator's request, before it sends SIGTERM: a service on the health port, for this machine only.

tandem drain ──Drain──> not ready; takes nothing new; finishes requests ──> answered ──> SIGTERM ends an idle process
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import aio

from tandem.rpc.endpoints import Refused, Servicer
from tandem.v1 import process_pb2, process_pb2_grpc


class DrainService(process_pb2_grpc.ProcessServiceServicer):
    """The service.

    `drain` returns True if nothing was left to do within the drain time; it may be called repeatedly.
    """

    def __init__(self, drain: Callable[[], Awaitable[bool]]) -> None:
        self._drain = drain
        self.servicer = Servicer(
            "tandem.v1.ProcessService", self, process_pb2_grpc.add_ProcessServiceServicer_to_server
        )

    async def Drain(
        self, request: process_pb2.DrainRequest, context: aio.ServicerContext[Any, Any]
    ) -> process_pb2.DrainResponse:
        if not is_local(context.peer()):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "draining is asked for on the process's own machine")
        return process_pb2.DrainResponse(drained=await self._drain())


def is_local(peer: str) -> bool:
    """True for a gRPC peer on this machine, such as ipv4:127.0.0.1:5000 or ipv6:%5B::1%5D:5000."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return False
    host = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    mapped = getattr(host, "ipv4_mapped", None)
    return (mapped or host).is_loopback
