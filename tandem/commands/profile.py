"""`tandem profile WORKER`: a worker samples its own threads, as a file for speedscope."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from grpc import aio
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem import rpc
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.own_cluster import with_own_password, with_own_secret
from tandem.registry import Registry, RegistryUnavailable
from tandem.security import ClusterSettings
from tandem.settings import load
from tandem.v1 import process_pb2, process_pb2_grpc

MARGIN_S = 10.0


class ProfileSettings(ClusterSettings):
    """Have a worker sample what its threads do, and write that to a file that speedscope.app opens."""

    worker: CliPositionalArg[str] = Field(description="its name, as `tandem top` shows it", min_length=1)
    seconds: float = Field(5.0, gt=0, le=60, description="for how long")
    redis_url: str = Field(UP_ADDRESSES["redis_url"], description="the registry, which says where the worker is")
    namespace: str = Field("tandem", min_length=1, description="prefix of its keys: one per cluster")
    out: Path | None = Field(None, description="the file; if not given, WORKER.speedscope.json")


def main(arguments: list[str]) -> None:
    settings = load(ProfileSettings, arguments, "tandem profile")
    settings = with_own_secret(settings, settings.redis_url, settings.namespace)
    try:
        made = asyncio.run(_profile(settings))
    except (RegistryUnavailable, ValueError) as error:
        raise SystemExit(f"tandem profile: {error}") from None
    except aio.AioRpcError as error:
        raise SystemExit(f"tandem profile: {error.code().name}: {error.details()}") from None
    out = settings.out or Path(re.sub(r"[^\w.-]", "_", settings.worker) + ".speedscope.json")
    out.write_bytes(made)
    print(f"{out}: open it at https://www.speedscope.app")


async def _profile(settings: ProfileSettings) -> bytes:
    """
    Raises:
        RegistryUnavailable | aio.AioRpcError
        ValueError: there is no such worker.
    """
    registry = Registry.connect(with_own_password(settings.redis_url), namespace=settings.namespace)
    try:
        found = {worker.info.worker_id: worker.info.grpc_address for worker in await registry.workers()}
    finally:
        await registry.close()
    if settings.worker not in found:
        raise ValueError(f"no worker is called {settings.worker!r}; there are: {', '.join(sorted(found)) or 'none'}")
    async with rpc.channel(found[settings.worker], settings.security) as channel:
        stub = process_pb2_grpc.ProfileServiceStub(channel)
        request = process_pb2.ProfileRequest(seconds=settings.seconds)
        return bytes((await stub.Profile(request, timeout=settings.seconds + MARGIN_S)).speedscope)
