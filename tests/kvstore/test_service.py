"""The kvstore's gRPC calls, over a real channel and a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from services.kvstore.server import MAX_HASHES, KVStoreService
from tandem import rpc
from tandem.local import RedisServer
from tandem.registry import Registry, Role
from tandem.rpc.integrity_service import IntegrityService
from tandem.v1 import kvstore_pb2, kvstore_pb2_grpc, process_pb2, process_pb2_grpc
from tests.registry.cluster import register_pool, worker_info, worker_load

A, B = b"a" * 16, b"\xff" * 16


async def stub_for(registry: Registry) -> AsyncIterator[kvstore_pb2_grpc.KVStoreServiceAsyncStub]:
    server = await rpc.serve([KVStoreService(registry).servicer], "127.0.0.1", 0)
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        yield kvstore_pb2_grpc.KVStoreServiceStub(channel)
    await server.stop(0)


@pytest.fixture
async def stub(registry: Registry) -> AsyncIterator[kvstore_pb2_grpc.KVStoreServiceAsyncStub]:
    async for made in stub_for(registry):
        yield made


async def test_workers_are_listed_with_load_and_reservations(
    stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub, registry: Registry
) -> None:
    assert not (await stub.ListWorkers(kvstore_pb2.ListWorkersRequest(), timeout=30)).workers
    await registry.leases.register(worker_info("d0", Role.DECODE), worker_load(num_running=3, free_blocks=60), 30)
    load = worker_load(num_waiting=2, linked=("d0-first",))
    await registry.leases.register(worker_info("p0", Role.PREFILL), load, 30)
    await registry.reservations.select_and_reserve(
        request_id="r", model="demo", prompt_tokens=40, max_new_tokens=8, prefill="require", ttl=30
    )
    decode, prefill = (await stub.ListWorkers(kvstore_pb2.ListWorkersRequest(), timeout=30)).workers
    assert decode == kvstore_pb2.Worker(
        worker_id="d0", role="decode", incarnation="d0-first", grpc_address="d0:1", transfer_address="d0:2",
        model="demo", kv_layout_hash="layout", num_blocks=64, free_blocks=60, num_running=3, reserved_blocks=3,
    )  # fmt: skip
    assert prefill == kvstore_pb2.Worker(
        worker_id="p0", role="prefill", incarnation="p0-first", grpc_address="p0:1", model="demo",
        kv_layout_hash="layout", num_blocks=64, free_blocks=64, num_waiting=2, linked=["d0-first"], reserved_tokens=40,
    )  # fmt: skip


async def test_blocks_are_located_in_the_order_asked(
    stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub, registry: Registry
) -> None:
    await register_pool(registry)
    await registry.leases.publish_blocks("d0", "d0-first", [A], [])
    await registry.leases.publish_blocks("p0", "p0-first", [A], [])
    response = await stub.LocateBlocks(kvstore_pb2.LocateBlocksRequest(block_hashes=[B, A]), timeout=30)
    assert [(found.block_hash, list(found.worker_ids)) for found in response.locations] == [(B, []), (A, ["d0", "p0"])]


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


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([A, b"short"], "block_hashes[1]: must be 16 bytes, got 5"),
        ([A] * (MAX_HASHES + 1), "block_hashes: at most 16384 in one call, got 16385"),
    ],
)
async def test_bad_hashes_are_named(
    stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub, hashes: list[bytes], message: str
) -> None:
    with pytest.raises(aio.AioRpcError) as raised:
        await stub.LocateBlocks(kvstore_pb2.LocateBlocksRequest(block_hashes=hashes), timeout=30)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)


async def test_without_redis_calls_are_unavailable_and_work_again_after(own_redis: RedisServer) -> None:
    registry = Registry.connect(own_redis.url, timeout=30.0)
    async for stub in stub_for(registry):
        own_redis.kill()
        with pytest.raises(aio.AioRpcError, match=f"Redis at 127.0.0.1:{own_redis.port}") as raised:
            await stub.ListWorkers(kvstore_pb2.ListWorkersRequest(), timeout=30)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        with RedisServer.start(own_redis.port):
            await stub.ListWorkers(kvstore_pb2.ListWorkersRequest(), timeout=30)
    await registry.close()
