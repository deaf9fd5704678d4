"""The kvstore's gRPC calls, over a real channel and a real Redis."""

from __future__ import annotations

from tandem import rpc
from tandem.registry import Registry
from tandem.rpc.integrity_service import IntegrityService
from tandem.v1 import process_pb2, process_pb2_grpc
from tests.registry.cluster import register_pool


async def test_integrity_names_contradictions(registry: Registry) -> None:
    await register_pool(registry)
    service = IntegrityService(registry.check_integrity).servicer
    server = await rpc.serve([service], "127.0.0.1", 0)
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        stub = process_pb2_grpc.IntegrityServiceStub(channel)
        answer = await stub.CheckIntegrity(process_pb2.CheckIntegrityRequest(), timeout=30)
    await server.stop(0)
    assert not answer.violations
    assert answer.held["leases"] == len(await registry.workers())
