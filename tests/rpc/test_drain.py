"""Draining at an orchestrator's request, against a real gRPC server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem import rpc
from tandem.commands.drain import DrainSettings, drain
from tandem.local import free_ports
from tandem.rpc.drain import DrainService, is_local

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:41234", True),
        ("ipv4:127.8.8.8:41234", True),
        ("ipv6:%5B::1%5D:41234", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:41234", True),
        ("ipv4:10.1.2.3:41234", False),
        ("ipv6:%5Bfd00::5%5D:41234", False),
        ("ipv6:%5B::ffff:10.1.2.3%5D:41234", False),
        ("unix:/tmp/socket", False),
    ],
)
def test_only_the_own_machine_is_local(peer: str, local: bool) -> None:
    assert is_local(peer) is local


async def status(address: str, service: str = "") -> int:
    async with rpc.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
    return int(answer.status)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_command_waits_for_the_process_to_finish(host: str) -> None:
    finished = asyncio.Event()

    async def finish() -> bool:
        await finished.wait()
        return True

    [port] = free_ports(1)
    server = await rpc.serve([], host, 0)
    await server.add_probes(host, port, DrainService(finish).servicer)
    try:
        assert await status(rpc.address(host, port)) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status(rpc.address(host, port), rpc.LIVE) == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(True)
        assert await status(rpc.address(host, port)) == health_pb2.HealthCheckResponse.SERVING
        draining = asyncio.create_task(drain(DrainSettings(host=host, health_port=port, drain_s=5)))
        await asyncio.sleep(0.2)
        assert not draining.done()
        finished.set()
        assert await draining is True
    finally:
        await server.stop(0)


async def test_a_process_that_is_gone_says_so(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with pytest.raises(aio.AioRpcError) as gone:
        await drain(DrainSettings(health_port=port, drain_s=1))
    assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
