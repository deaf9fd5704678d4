"""A worker's lease, and the KV blocks that the registry finds at the worker while the lease lasts.

register ── heartbeat … ── deregister          the lease ends by itself `ttl` after the last heartbeat
publish_blocks                                 what its prefix cache has gained and lost
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.registry.errors import IncompatibleLayout, StaleIncarnation, WorkerIdTaken
from tandem.registry.wire import RegistryConnection, milliseconds
from tandem.registry.worker import WorkerInfo, WorkerLoad, encode


class WorkerLeases:
    """Takes, renews and ends workers' leases; each worker its own."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection

    async def register(self, info: WorkerInfo, load: WorkerLoad, ttl: float) -> None:
        """Takes the worker's lease for `ttl` seconds.

        An earlier incarnation at the same address of the same host must have ended: it loses everything immediately.
        One that listens elsewhere may be another cluster's worker: its lease is not taken over while it lasts.

        A worker without a possible partner is refused: live workers of the other role serve its model and revision,
        but all have another KV layout. Other weights are another revision, so both are served side by side. For
        another layout of the same weights, a worker of each role has to register within ten minutes (or those of
        the other role leave or drain); a refused worker is then accepted when it registers again.

        Raises:
            WorkerIdTaken: a worker elsewhere has the lease; the error names it.
            IncompatibleLayout: no worker of the other role has its KV layout; the error names both layouts.
            StaleIncarnation: a later registration has replaced this incarnation, or it has deregistered.
        """
        await self._lease("register", info, load, ttl)

    async def heartbeat(self, info: WorkerInfo, load: WorkerLoad, ttl: float) -> bool:
        """Renews the lease.

        Returns True if it had to be taken again (Redis lost it, or it had run out): the worker must
        then publish all its blocks again.

        Raises:
            StaleIncarnation: another incarnation holds the lease, or this one was replaced or has deregistered.
        """
        return await self._lease("heartbeat", info, load, ttl) == "new"

    async def deregister(self, worker_id: str, incarnation: str) -> None:
        """Ends the lease, if this incarnation has it. The incarnation cannot register again."""
        await self._connection.call("deregister", worker_id, incarnation)

    async def publish_blocks(
        self, worker_id: str, incarnation: str, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        """Reports the KV blocks that the worker's prefix cache has gained and lost. No hash may be in both.

        Raises:
            StaleIncarnation: this incarnation holds no lease.
        """
        if await self._connection.call("publish", worker_id, incarnation, len(removed), *removed, *stored) == "stale":
            raise StaleIncarnation(worker_id, incarnation)

    async def _lease(self, kind: str, info: WorkerInfo, load: WorkerLoad, ttl: float) -> str:
        fields = encode(info) + encode(load)
        owner = info.worker_id, info.incarnation
        status, *other = await self._connection.call("lease", *owner, milliseconds(ttl), kind, *fields)
        if status == "stale":
            raise StaleIncarnation(info.worker_id, info.incarnation)
        if status == "taken":
            raise _id_taken(info, *other)
        if status == "incompatible":
            raise _incompatible_layout(info, *other)
        return str(status)


def _id_taken(info: WorkerInfo, address: str, host: str, model: str, ends_in_ms: int) -> WorkerIdTaken:
    return WorkerIdTaken(
        f"worker_id: {info.worker_id} at {info.grpc_address} on host {info.host}, which serves model {info.model}, "
        f"cannot register: a live worker of that id is at {address} on host {host} and serves model {model}. "
        "Give this worker an id of its own, or its cluster a namespace of its own",
        ends_in_ms / 1000,
    )


def _incompatible_layout(info: WorkerInfo, worker_id: str, layout_hash: str, role: str) -> IncompatibleLayout:
    return IncompatibleLayout(
        f"layout_hash: {info.layout_hash} is the KV layout of {info.role} worker {info.worker_id}, and of no live "
        f"{role} worker of model {info.model}, revision {info.revision}: that of {worker_id} is {layout_hash}. "
        "Layouts are equal where dtype, block size and tensor parallelism are"
    )
