"""A worker's lease, where another start of it has left one."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from tandem.registry import Registry, Role, StaleIncarnation, WorkerIdTaken
from tandem.worker.life.lease import Lease
from tests.registry.cluster import worker_info, worker_load
from tests.registry.conftest import connect, namespace, redis_server, registry

__all__ = ["connect", "namespace", "redis_server", "registry"]

TTL = 0.5
BEFORE = worker_info("d0", Role.DECODE, "before")
ELSEWHERE = worker_info("d0", Role.DECODE, "after", grpc_address="elsewhere:1")


def lease_of(registry: Registry) -> Lease:
    return Lease(registry, ELSEWHERE, worker_load, ttl=TTL, on_forgotten=lambda: None)


async def test_the_lease_of_a_dead_start_is_waited_for(registry: Registry) -> None:
    await registry.leases.register(BEFORE, worker_load(), TTL)
    lease = lease_of(registry)
    holding = asyncio.create_task(lease.hold())
    async with asyncio.timeout(10):
        await lease.held.wait()
    assert [worker.info for worker in await registry.workers()] == [ELSEWHERE]
    assert not holding.done()
    holding.cancel()


@pytest.mark.parametrize(("process", "waits"), [("gone", False), ("stopped", True)])
async def test_a_lease_whose_process_is_gone_is_not_waited_for(registry: Registry, process: str, waits: bool) -> None:
    """However long a starved one's lasts: this host's kernel knows of its end. One that is stopped may go on."""
    before = worker_info("d0", Role.DECODE, "before", process=process)
    await registry.leases.register(before, worker_load(), 30.0)
    lease = Lease(
        registry, ELSEWHERE, worker_load, ttl=30.0, on_forgotten=lambda: None, is_gone=lambda process: process == "gone"
    )
    holding = asyncio.create_task(lease.hold())
    with pytest.raises(TimeoutError) if waits else nullcontext():
        async with asyncio.timeout(3):
            await lease.held.wait()
    holding.cancel()
    assert [worker.info for worker in await registry.workers()] == [before if waits else ELSEWHERE]
    if not waits:
        with pytest.raises(StaleIncarnation):
            await registry.leases.heartbeat(before, worker_load(), TTL)


async def test_a_lease_that_is_renewed_is_respected(registry: Registry) -> None:
    await registry.leases.register(BEFORE, worker_load(), TTL)
    holding = asyncio.create_task(lease_of(registry).hold())
    async with asyncio.timeout(20):
        while not holding.done():
            assert not await registry.leases.heartbeat(BEFORE, worker_load(), 6 * TTL)
            await asyncio.sleep(TTL / 5)
    with pytest.raises(WorkerIdTaken, match="a live worker of that id is at d0:1"):
        await holding
    assert [worker.info for worker in await registry.workers()] == [BEFORE]


async def test_the_lease_of_a_starved_worker_outlasts_beats_that_come_late(registry: Registry) -> None:
    starved = Lease(
        registry, ELSEWHERE, worker_load, ttl=TTL, on_forgotten=lambda: pytest.fail("lost"), starvation=lambda: 60.0
    )
    holding = asyncio.create_task(starved.hold())
    async with asyncio.timeout(10):
        await starved.held.wait()
    holding.cancel()
    await asyncio.sleep(4 * TTL)
    assert [worker.info for worker in await registry.workers()] == [ELSEWHERE]
