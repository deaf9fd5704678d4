"""`tandem drain`: have the process beside this one finish, as Kubernetes does before it stops a pod."""

from __future__ import annotations

import asyncio

from grpc import aio
from pydantic import Field

from tandem import rpc
from tandem.hosts import Host, reached_from_here
from tandem.settings import Settings, load
from tandem.v1 import process_pb2, process_pb2_grpc

# Added to the process's own bound, for its answer to arrive.
MARGIN_S = 5.0


class DrainSettings(Settings):
    """Ask the service on this machine, whose environment this reads, to take nothing new and finish what it has."""

    host: Host = Field("127.0.0.1", description="address the service listens on")
    health_port: int = Field(description="its health port", ge=1, le=65535)
    drain_s: float = Field(60.0, ge=0, description="its drain time")


def main(arguments: list[str]) -> None:
    settings = load(DrainSettings, arguments, "tandem drain")
    try:
        drained = asyncio.run(drain(settings))
    except aio.AioRpcError as error:
        raise SystemExit(f"{error.code().name}: {error.details()}") from None
    if not drained:
        raise SystemExit(f"not drained within {settings.drain_s} s")


async def drain(settings: DrainSettings) -> bool:
    """Raises aio.AioRpcError when the process does not answer."""
    async with rpc.channel(rpc.address(reached_from_here(settings.host), settings.health_port)) as channel:
        stub = process_pb2_grpc.ProcessServiceStub(channel)
        answer = await stub.Drain(process_pb2.DrainRequest(), timeout=settings.drain_s + MARGIN_S)
    return answer.drained
