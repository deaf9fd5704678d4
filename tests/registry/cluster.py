"""Workers for a test to register, and a wait with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis

from tandem.registry import (
    BlockReplica,
    ClusterView,
    PromptPrefix,
    Registry,
    RegistryUnavailable,
    Role,
    WorkerInfo,
    WorkerLoad,
)
from tandem.registry.wire.scripts import key_prefix

MODEL = "demo"
REVISION = "r1"
BLOCK_SIZE = 16
NUM_BLOCKS = 64
TTL = 30.0


def worker_info(worker_id: str, role: Role, incarnation: str = "", **changed: object) -> WorkerInfo:
    fields: dict[str, object] = {
        "worker_id": worker_id, "role": role, "incarnation": incarnation or f"{worker_id}-first",
        "grpc_address": f"{worker_id}:1", "transfer_address": f"{worker_id}:2" if role is Role.DECODE else "",
        "model": MODEL, "revision": REVISION, "layout_hash": "layout", "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS, "max_num_seqs": 8, "max_model_len": 512, "transports": ("shm", "tcp"), "host": "here",
    }  # fmt: skip
    return WorkerInfo(**{**fields, **changed})  # type: ignore[arg-type]


def worker_load(**changed: object) -> WorkerLoad:
    fields: dict[str, object] = {"free_blocks": NUM_BLOCKS, "num_waiting": 0, "num_running": 0, "queued_tokens": 0}
    return WorkerLoad(**{**fields, **changed})  # type: ignore[arg-type]


async def register_pool(registry: Registry, prefill: int = 1, decode: int = 1, ttl: float = TTL) -> None:
    """p0, p1 … and d0, d1 …, every pair linked."""
    incarnations = tuple(f"d{i}-first" for i in range(decode))
    for i in range(decode):
        await registry.leases.register(worker_info(f"d{i}", Role.DECODE), worker_load(), ttl)
    for i in range(prefill):
        await registry.leases.register(worker_info(f"p{i}", Role.PREFILL), worker_load(linked=incarnations), ttl)


async def end_client_leases(redis: Redis, namespace: str) -> None:
    """As if they had run out."""
    clients = f"{key_prefix(namespace)}clients"
    await redis.zadd(clients, {str(client): 1 for client in await redis.zrange(clients, 0, -1)})


async def known_prefix(registry: Registry, hashes: Sequence[bytes]) -> PromptPrefix:
    """The cached prefix of a prompt, as a gateway knows it whose replica is up to date."""
    replica = BlockReplica(registry.block_feed)
    await replica.refresh()
    return PromptPrefix.of(REVISION, BLOCK_SIZE, hashes, replica.holders(hashes))


@asynccontextmanager
async def viewing(registry: Registry, **options: float) -> AsyncIterator[ClusterView]:
    """A view that a task keeps fresh."""
    view = ClusterView(registry, **options)
    with suppress(RegistryUnavailable):
        await view.refresh()
    task = asyncio.create_task(view.run())
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# By far longer than anything that a test waits for takes on any machine.
PATIENCE_S = 60.0


async def eventually(check: Callable[[], Awaitable[bool]], what: str) -> float:
    """Waits until `check()` holds; returns how long that took."""
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE_S:
        if await check():
            return time.monotonic() - start
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE_S} s: {what}")
