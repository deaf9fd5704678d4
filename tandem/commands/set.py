"""`tandem set NAME=VALUE …`: change settings of all running gateways, and of workers, for a while."""

from __future__ import annotations

import asyncio
import json
from getpass import getuser
from socket import gethostname
from typing import Any

import httpx
from grpc import aio
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem import rpc
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.gateways import addresses, http_client, said_by
from tandem.commands.clusters.own_cluster import with_own_password, with_own_secret
from tandem.registry import Registry, RegistryUnavailable, WorkerInfo
from tandem.security import ClusterSettings
from tandem.settings import load
from tandem.v1 import process_pb2, process_pb2_grpc
from tandem.worker import FOLLOWED


class SetSettings(ClusterSettings):
    """Set what gateways and workers follow at run time, until its time is over; without NAME=VALUE, show what is in
    force."""

    settings: CliPositionalArg[list[str]] = Field(
        [], description="NAME=VALUE, the value as JSON or a word; null: as it was"
    )
    ttl_s: float = Field(600.0, gt=0, description="for how long")
    gateway_url: str = Field(UP_ADDRESSES["gateway_url"], description="a gateway, where the registry does not answer")
    redis_url: str = Field(UP_ADDRESSES["redis_url"], description="the registry, which names all gateways")
    namespace: str = Field("tandem", min_length=1, description="prefix of its keys: one per cluster")
    api_key: str = Field("", description="one that manages models, where gateways ask for a key")
    timeout_s: float = Field(10.0, gt=0, description="bound of each gateway's answer")


def main(arguments: list[str]) -> None:
    settings = load(SetSettings, arguments, "tandem set")
    settings = with_own_secret(settings, settings.redis_url, settings.namespace)
    changes = dict(map(_parsed, settings.settings))
    if problems := asyncio.run(_set_everywhere(settings, changes)):
        raise SystemExit("tandem set: " + "\n".join(problems))


async def _set_everywhere(settings: SetSettings, changes: dict[str, Any]) -> list[str]:
    """Set gateways first, which refuse wrong values, then workers, which follow some of the settings."""
    if problems := await _set(settings, changes):
        return problems
    of_workers = {name: value for name, value in changes.items() if name in FOLLOWED}
    if changes and not of_workers:
        return []
    try:
        registry = Registry.connect(with_own_password(settings.redis_url), namespace=settings.namespace)
        try:
            workers = [worker.info for worker in await registry.workers()]
        finally:
            await registry.close()
    except (RegistryUnavailable, ValueError) as error:
        return [f"workers are not known: {error}"]
    by = f"{getuser()} at {gethostname()}"
    request = process_pb2.OverrideRequest(settings=json.dumps(of_workers), ttl_s=settings.ttl_s, by=by)
    asked = await asyncio.gather(*(_set_worker(settings, worker, request) for worker in workers))
    return [problem for problem in asked if problem]


async def _set_worker(settings: SetSettings, worker: WorkerInfo, request: process_pb2.OverrideRequest) -> str:
    """Print a worker's answer. Returns why there is none, or ""."""
    try:
        async with rpc.channel(worker.grpc_address, settings.security) as channel:
            stub: Any = process_pb2_grpc.SettingsServiceStub(channel)
            answer = await stub.Override(request, timeout=settings.timeout_s)
    except aio.AioRpcError as error:
        return f"{worker.worker_id}: {error.details() or error.code().name}"
    print(worker.worker_id, answer.in_force)
    return ""


async def _set(settings: SetSettings, changes: dict[str, Any]) -> list[str]:
    """Print each gateway's answer. Returns those that refused or did not answer."""
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    body, problems = {"settings": changes, "ttl_s": settings.ttl_s}, []
    found = await addresses(settings.redis_url, settings.namespace) or [settings.gateway_url.rstrip("/")]
    async with http_client(settings.timeout_s, headers) as client:
        for gateway in found:
            url = f"{gateway}/debug/settings"
            try:
                answer = await (client.post(url, json=body) if changes else client.get(url))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problems.append(f"{gateway}: {error or type(error).__name__}")
                continue
            if answer.status_code != 200:
                problems.append(f"{gateway}: {said_by(answer)}")
                continue
            print(gateway, json.dumps(answer.json(), indent=1), sep="\n")
    return problems


def _parsed(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"tandem set: {text!r} is no NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value
