"""The kvstore's gRPC service: the registry as people and tools see it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from grpc import aio

from tandem import rpc
from tandem.block_hash import HASH_BYTES
from tandem.registry import LiveWorker, Registry, RegistryUnavailable
from tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

NAME = "tandem.v1.KVStoreService"
MAX_HASHES = 16384
T = TypeVar("T")


class KVStoreService(kvstore_pb2_grpc.KVStoreServiceServicer):
    """Reads the registry; UNAVAILABLE while Redis is."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.servicer = rpc.Servicer(NAME, self, kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server)

    async def ListWorkers(
        self, request: kvstore_pb2.ListWorkersRequest, context: aio.ServicerContext[Any, Any]
    ) -> kvstore_pb2.ListWorkersResponse:
        workers = await _reached(self._registry.workers())
        return kvstore_pb2.ListWorkersResponse(workers=[_worker(worker) for worker in workers])

    async def LocateBlocks(
        self, request: kvstore_pb2.LocateBlocksRequest, context: aio.ServicerContext[Any, Any]
    ) -> kvstore_pb2.LocateBlocksResponse:
        hashes = list(request.block_hashes)
        _check(hashes)
        holders = await _reached(self._registry.locate(hashes))
        return kvstore_pb2.LocateBlocksResponse(
            locations=[
                kvstore_pb2.BlockLocation(block_hash=block_hash, worker_ids=worker_ids)
                for block_hash, worker_ids in zip(hashes, holders, strict=True)
            ]
        )


async def _reached(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except RegistryUnavailable as error:
        raise rpc.Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error


def _check(hashes: list[bytes]) -> None:
    if len(hashes) > MAX_HASHES:
        message = f"block_hashes: at most {MAX_HASHES} in one call, got {len(hashes)}"
        raise rpc.Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
    for i, block_hash in enumerate(hashes):
        if len(block_hash) != HASH_BYTES:
            message = f"block_hashes[{i}]: must be {HASH_BYTES} bytes, got {len(block_hash)}"
            raise rpc.Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


def _worker(worker: LiveWorker) -> kvstore_pb2.Worker:
    info, load = worker.info, worker.load
    return kvstore_pb2.Worker(
        worker_id=info.worker_id,
        role=info.role.value,
        incarnation=info.incarnation,
        grpc_address=info.grpc_address,
        transfer_address=info.transfer_address,
        model=info.model,
        kv_layout_hash=info.layout_hash,
        num_blocks=info.num_blocks,
        free_blocks=load.free_blocks,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        linked=load.linked,
        reserved_tokens=worker.reserved_tokens,
        reserved_blocks=worker.reserved_blocks,
    )
