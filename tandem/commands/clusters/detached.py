"""`tandem status` and `tandem down`: a cluster that was left running on Ray."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cluster import DEFAULT_NAMESPACE
from tandem.commands.clusters.running import down_here
from tandem.registry import Registry, RegistryUnavailable
from tandem.settings import Settings, load

if TYPE_CHECKING:
    from tandem.local.ray import RayLauncher


class DetachedSettings(Settings):
    """Settings of a command about a cluster that `tandem up --ray --detach` left running."""

    ray: str = Field("auto", description="address of the Ray cluster; auto: the one of this machine")
    ray_namespace: str = Field("tandem", min_length=1, description="Ray's name for the cluster's actors")


def status(arguments: list[str]) -> None:
    _run(_status(load(DetachedSettings, arguments, "tandem status")))


def down(arguments: list[str]) -> None:
    if not any(argument.startswith("--ray") for argument in arguments):
        down_here(arguments)
        return
    _run(_down(load(DetachedSettings, with_ray_address(arguments), "tandem down")))


def _run(command: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(command)
    except ConnectionError as error:
        raise SystemExit(str(error)) from None


def with_ray_address(arguments: list[str]) -> list[str]:
    """Returns the arguments with `--ray` alone replaced by `--ray auto`."""
    following = [*arguments[1:], "--"]
    return [
        "--ray=auto" if argument == "--ray" and after.startswith("-") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


async def _status(settings: DetachedSettings) -> None:
    from tandem.local.ray import RayLauncher, connect

    await connect(settings.ray, settings.ray_namespace)
    console = Console()
    launcher = RayLauncher(print, detached=True)
    states = await launcher.states()
    if not states:
        raise SystemExit(f"no cluster runs in Ray namespace {settings.ray_namespace!r}")
    table = Table("service", "state", "address", "incarnation", "node", "pid", box=None)
    for name, state in sorted(states.items()):
        if isinstance(state, str):
            table.add_row(name, escape(state))
        else:
            condition = state.error or ("ready" if state.ready else "starting")
            address = re.sub(":[^:@/]+@", ":***@", state.address)
            table.add_row(name, escape(condition), address, state.incarnation[:8], state.node[:8], str(state.pid))
    console.print(table, soft_wrap=True)
    console.print(*await _gateways(launcher), sep="\n", soft_wrap=True)
    if not all(not isinstance(state, str) and state.ready for state in states.values()):
        raise SystemExit(1)


async def _gateways(launcher: RayLauncher) -> list[str]:
    """Returns a line for each registered gateway, those outside Ray included."""
    from tandem.local.ray import service_address

    kvstore = await launcher.kvstore()
    if kvstore is None:
        return ["no kvstore runs, so the registry is not known"]
    registry = Registry.connect(
        service_address(kvstore), namespace=str(kvstore.settings.get("namespace", DEFAULT_NAMESPACE))
    )
    try:
        found = await registry.gateways.live()
    except RegistryUnavailable as error:
        return [escape(f"the registry does not say which gateways there are: {error}")]
    finally:
        await registry.close()
    return [escape(f"{at.model}: http://{at.http}/v1, gRPC {at.grpc}") for at in found] or ["no gateway has registered"]


async def _down(settings: DetachedSettings) -> None:
    from tandem.local.ray import RayLauncher, connect

    await connect(settings.ray, settings.ray_namespace)
    launcher = RayLauncher(print, detached=True)
    names = sorted(launcher.names)
    await launcher.stop()
    print(f"stopped {', '.join(names)}" if names else f"no cluster runs in Ray namespace {settings.ray_namespace!r}")
