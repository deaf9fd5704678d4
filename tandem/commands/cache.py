"""`tandem cache`: what all workers' caches and tiers hold, of whom; drop a tenant's blocks, or pin them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from grpc import aio
from pydantic import Field

from tandem import rpc
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.own_cluster import with_own_password, with_own_secret
from tandem.registry import Registry, RegistryUnavailable, WorkerInfo
from tandem.security import ClusterSettings
from tandem.settings import load
from tandem.v1 import worker_pb2, worker_pb2_grpc

USAGE = """usage: tandem cache <action> [options]

actions:
  ls      what each worker's cache on its device, its host memory and disk hold; with --tenants, of whom
  drop    drop a tenant's blocks, or all, from all of these; done when it answers
  pin     keep a tenant's blocks in host memory and on disk, up to half of each

`tandem cache <action> --help` lists an action's options."""


class CacheSettings(ClusterSettings):
    """Settings of all actions."""

    redis_url: str = Field(UP_ADDRESSES["redis_url"], description="the registry, which names all workers")
    namespace: str = Field("tandem", min_length=1, description="prefix of its keys: one per cluster")
    timeout_s: float = Field(10.0, gt=0, description="bound of each worker's answer")
    model: str | None = Field(None, description="only workers of this model")


class CacheLsSettings(CacheSettings):
    """Show what each worker's cache on its device, its host memory and disk hold."""

    tenants: bool = Field(False, description="by tenant: by a hash of its name where the worker has not seen it yet")


class CacheDropSettings(CacheSettings):
    """Drop a tenant's blocks, or all tenants', from caches, host memory and disks of all running workers.

    When it answers, nobody finds or restores them any more. What requests compute from then on is kept again."""

    tenant: str | None = Field(None, description="whose; if not given, all")


class CachePinSettings(CacheSettings):
    """Have a tenant's blocks stay in host memory and on disk whatever others need, up to half of each, until a worker
    starts again."""

    tenant: str = Field(description="whose")
    for_s: float | None = Field(None, gt=0, alias="for", description="for so many seconds; if not given, without end")
    off: bool = Field(False, description="no longer")


Said = TypeVar("Said", bound=CacheSettings)


def main(arguments: list[str]) -> None:
    action = arguments[0] if arguments else ""
    actions: dict[str, Callable[[list[str]], None]] = {"ls": _ls, "drop": _drop, "pin": _pin}
    if action in ("-h", "--help"):
        print(USAGE)
        return
    if action not in actions:
        print(f"tandem cache: {action!r} is no action\n" * bool(action) + USAGE, file=sys.stderr)
        raise SystemExit(2)
    actions[action](arguments[1:])


def _ls(arguments: list[str]) -> None:
    settings = _loaded(CacheLsSettings, arguments, "ls")

    async def ask(worker: WorkerInfo, stub: Any) -> list[str]:
        answer = await stub.ListCache(worker_pb2.ListCacheRequest(), timeout=settings.timeout_s)
        return [line for tier in answer.tiers for line in _lines(worker.worker_id, tier, settings.tenants)]

    head = f"{'worker':<32}{'tier':<8}{'blocks':>10}{'memory':>12}{'used':>8}" + "  tenant" * settings.tenants
    _everywhere(settings, "ls", ask, head)


def _lines(worker: str, tier: worker_pb2.CacheTier, by_tenant: bool) -> Iterator[str]:
    """Yields the line of a tier; with `by_tenant` a line of each tenant, the one with the most blocks first."""

    def line(num_blocks: int, tenant: str = "") -> str:
        share = num_blocks / max(1, tier.max_blocks)
        size = f"{num_blocks * tier.block_bytes / 2**20:.1f} MiB"
        return f"{worker:<32}{tier.name:<8}{num_blocks:>10}{size:>12}{share:>8.1%}  {tenant}".rstrip()

    if not by_tenant or not tier.tenants:
        yield line(sum(one.num_blocks for one in tier.tenants))
        return
    for one in sorted(tier.tenants, key=lambda one: (-one.num_blocks, one.owner)):
        yield line(one.num_blocks, _name(one))


def _name(one: worker_pb2.TenantBlocks) -> str:
    if one.HasField("tenant"):
        return one.tenant or "(no tenant)"
    return one.owner.hex() or "(not known)"


def _drop(arguments: list[str]) -> None:
    settings = _loaded(CacheDropSettings, arguments, "drop")

    async def ask(worker: WorkerInfo, stub: Any) -> list[str]:
        answer = await stub.DropCache(worker_pb2.DropCacheRequest(tenant=settings.tenant), timeout=settings.timeout_s)
        dropped = ", ".join(f"{number} of {name}" for name, number in answer.num_blocks.items())
        return [f"{worker.worker_id}: blocks dropped: {dropped}"]

    _everywhere(settings, "drop", ask)


def _pin(arguments: list[str]) -> None:
    settings = _loaded(CachePinSettings, arguments, "pin")
    seconds = 0.0 if settings.off else settings.for_s
    said = "no longer pinned" if settings.off else "pinned"

    async def ask(worker: WorkerInfo, stub: Any) -> list[str]:
        request = worker_pb2.PinCacheRequest(tenant=settings.tenant, seconds=seconds)
        answer = await stub.PinCache(request, timeout=settings.timeout_s)
        where = f"{said} in {', '.join(answer.tiers)}" if answer.tiers else "it has neither --kv-host nor --kv-disk"
        return [f"{worker.worker_id}: {where}"]

    _everywhere(settings, "pin", ask)


def _loaded(kind: type[Said], arguments: list[str], action: str) -> Said:
    settings = load(kind, arguments, f"tandem cache {action}")
    return with_own_secret(settings, settings.redis_url, settings.namespace)


def _everywhere(
    settings: CacheSettings, action: str, ask: Callable[[WorkerInfo, Any], Awaitable[list[str]]], head: str = ""
) -> None:
    """Prints what workers answer, below `head`. The command fails if any of them does not."""
    try:
        problems = asyncio.run(_ask_all(settings, ask, head))
    except (RegistryUnavailable, OSError, ValueError) as error:
        problems = [str(error)]
    if problems:
        raise SystemExit(f"tandem cache {action}: " + "\n".join(problems))


async def _ask_all(
    settings: CacheSettings, ask: Callable[[WorkerInfo, Any], Awaitable[list[str]]], head: str
) -> list[str]:
    """Prints each worker's answer. Returns why others have none.

    Raises:
        RegistryUnavailable | OSError
        ValueError: there is no such worker.
    """
    registry = Registry.connect(with_own_password(settings.redis_url), namespace=settings.namespace)
    try:
        workers = sorted((worker.info for worker in await registry.workers()), key=lambda worker: worker.worker_id)
    finally:
        await registry.close()
    if not workers:
        raise ValueError("no worker is registered")
    models = ", ".join(sorted({worker.model for worker in workers}))
    workers = [worker for worker in workers if settings.model in (None, worker.model)]
    if not workers:
        raise ValueError(f"no worker serves {settings.model!r}; they serve: {models}")
    problems: list[str] = []

    async def answer(worker: WorkerInfo) -> list[str]:
        try:
            async with rpc.channel(worker.grpc_address, settings.security) as channel:
                return await ask(worker, worker_pb2_grpc.CacheServiceStub(channel))
        except aio.AioRpcError as error:
            problems.append(f"{worker.worker_id}: {error.details() or error.code().name}")
            return []

    answers = [line for lines in await asyncio.gather(*map(answer, workers)) for line in lines]
    print("\n".join([head] * bool(head and answers) + answers), end="\n" if answers else "")
    return problems
