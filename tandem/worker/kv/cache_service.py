"""Answers `tandem cache` for a live worker: what its cache and tiers hold of whom; to drop it; to pin it.

A drop ends what is under way, too: what a peer or a tier is sending does not land, and nothing of the tenant is fetched
or restored for HELD_OFF_S, as another worker may be told of the drop a little later, and still have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

import grpc
from grpc import aio

from tandem import rpc
from tandem.tiers import owner_of
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.worker.engine import EngineDied, EnginePort
from tandem.worker.kv.tiers import KVTiers

DEVICE = "device"
HELD_OFF_S = 10.0


class CacheService(worker_pb2_grpc.CacheServiceServicer):
    def __init__(self, engine: EnginePort, tiers: KVTiers | None) -> None:
        self._engine, self._tiers = engine, tiers
        self._owners = engine.engine.moving.owners
        self.servicer = rpc.Servicer("tandem.v1.CacheService", self, worker_pb2_grpc.add_CacheServiceServicer_to_server)

    async def ListCache(
        self, request: worker_pb2.ListCacheRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ListCacheResponse:
        try:
            cached = await self._engine.call(lambda engine: engine.moving.counts())
        except EngineDied as error:
            raise _unavailable(error) from None
        of_device = [
            worker_pb2.TenantBlocks(tenant=tenant, owner=b"" if tenant is None else owner_of(tenant), num_blocks=number)
            for tenant, number in cached.items()
        ]
        size, block_bytes = self._engine.stats.num_blocks, self._engine.engine.layout.whole_block_bytes
        answer = [worker_pb2.CacheTier(name=DEVICE, block_bytes=block_bytes, max_blocks=size, tenants=of_device)]
        known = {owner_of(tenant): tenant for tenant in self._owners.tenants()}
        for name, holds in (self._tiers.holds if self._tiers else {}).items():
            of_tier = [
                worker_pb2.TenantBlocks(tenant=known.get(owner), owner=owner, num_blocks=number)
                for owner, number in holds.counts.items()
            ]
            answer.append(
                worker_pb2.CacheTier(name=name, block_bytes=holds.block_bytes, max_blocks=holds.most, tenants=of_tier)
            )
        return worker_pb2.ListCacheResponse(tiers=answer)

    async def DropCache(
        self, request: worker_pb2.DropCacheRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DropCacheResponse:
        try:
            dropped = await self.drop(request.tenant if request.HasField("tenant") else None)
        except (EngineDied, OSError) as error:
            raise _unavailable(error) from None
        return worker_pb2.DropCacheResponse(num_blocks=dropped)

    async def PinCache(
        self, request: worker_pb2.PinCacheRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PinCacheResponse:
        seconds = request.seconds if request.HasField("seconds") else inf
        if seconds < 0 or (request.HasField("seconds") and not isfinite(seconds)):
            raise rpc.Refused(grpc.StatusCode.INVALID_ARGUMENT, f"seconds: {seconds} is not at least 0")
        if self._tiers is None:
            return worker_pb2.PinCacheResponse()
        await self._tiers.pin(owner_of(request.tenant), seconds)
        return worker_pb2.PinCacheResponse(tiers=self._tiers.holds)

    async def drop(self, tenant: str | None) -> Mapping[str, int]:
        """Drops a tenant's blocks from the cache and the tiers; None: all. Returns how many each had.

        Raises:
            EngineDied | OSError: some may be left.
        """
        self._owners.hold_off(tenant)
        asyncio.get_running_loop().call_later(HELD_OFF_S, self._owners.let_in, tenant)
        dropped = {DEVICE: await self._engine.call(lambda engine: engine.moving.drop(tenant))}
        if self._tiers is not None:
            dropped |= await self._tiers.drop(None if tenant is None else owner_of(tenant))
        return dropped


def _unavailable(error: Exception) -> rpc.Refused:
    return rpc.Refused(grpc.StatusCode.UNAVAILABLE, str(error))
