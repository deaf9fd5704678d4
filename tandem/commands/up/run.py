"""The life of a cluster: starts in order, is ready when every pair has moved a block, stops by a signal."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import signal
import sys
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, TextIO, cast

import httpx
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from tandem.cluster import DEFAULT_NAMESPACE, Cluster
from tandem.commands.clusters.gateways import http_client
from tandem.commands.clusters.running import noted
from tandem.commands.up.display import capacities, lines_to_try, note_of, progress, status, stream_sample
from tandem.commands.up.on_demand import on_demand
from tandem.commands.up.plan import ClusterPlan
from tandem.commands.up.redis import redis_of, store_of
from tandem.commands.up.secret import with_secret
from tandem.commands.up_options import UpSettings
from tandem.local import Launcher, LocalLauncher, OnDemand, ServiceFailed, unless_failed, until_set
from tandem.process import LogOutput, descriptor_of
from tandem.registry import RedisAddress, Registry, RegistryUnavailable, report_death

if TYPE_CHECKING:
    from tandem.local.ray import RayLauncher


async def up_here(settings: UpSettings, cluster: Cluster, environment: Mapping[str, str]) -> None:
    for left in ("cores", "crashes"):
        shutil.rmtree(settings.logs / left, ignore_errors=True)
    redis_url, store_url, kvstore = redis_of(cluster, settings.logs, settings.store_url)
    cluster = with_secret(cluster, settings.logs)
    kvstore = replace(kvstore, settings={**kvstore.settings, **cluster.security})
    plan = ClusterPlan.of(cluster.storing(store_url), redis_url, kvstore, settings.logs, environment)
    console = _console()
    launcher = LocalLauncher(
        settings.logs, lambda text: console.print(escape(text), style="yellow"), on_death=report_death
    )
    await _until_stopped(_serve(settings, plan, launcher, console), launcher, console)


async def up_on_ray(settings: UpSettings, cluster: Cluster, environment: Mapping[str, str]) -> None:
    from tandem.local.ray import RayLauncher, connect, kvstore_on_ray, service_address, store_address

    console = _console()

    def report(text: str) -> None:
        console.print(escape(text), style="yellow")

    env, wait_s = cluster.ray.runtime_env, settings.ready_timeout_s
    await connect(settings.ray, settings.ray_namespace, env, wait_s=wait_s, report=report)
    launcher = RayLauncher(report, detached=settings.detach)
    running = await launcher.kvstore()
    if running:
        cluster = cluster.in_namespace(str(running.settings.get("namespace", DEFAULT_NAMESPACE)))
    given = store_of(cluster, settings.store_url)
    kvstore = running or kvstore_on_ray(cluster, given)
    redis_url = service_address(kvstore)
    shared = Path(gettempdir()) / f"tandem-{settings.ray_namespace}"  # on each node
    plan = ClusterPlan.of(cluster.storing(given or store_address(kvstore)), redis_url, kvstore, shared, environment)
    if not settings.detach:
        await _until_stopped(_serve(settings, plan, launcher, console), launcher, console)
        return
    before = launcher.names
    try:
        await _start(settings, plan, launcher, console)
    except ServiceFailed:
        await launcher.stop(launcher.names - before)
        raise
    await _roll(settings, plan, launcher, console)
    wanted = {service.name for service in (plan.kvstore, *plan.workers, *plan.gateways)}
    await launcher.stop(launcher.names - wanted)


async def _roll(settings: UpSettings, plan: ClusterPlan, launcher: RayLauncher, console: Console) -> None:
    """Replace services whose settings changed one after another, so that others of their kind serve meanwhile."""

    async def again(names: Collection[str]) -> None:
        try:
            async with asyncio.timeout(settings.ready_timeout_s):
                while not await launcher.are_ready(names):
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise TimeoutError(
                f"{', '.join(names)} did not get ready with changed settings; the rest is as it was"
            ) from None
        await _wait_until_ready(settings, plan, launcher, console)

    for place in await launcher.changed([*plan.workers, *plan.gateways]):
        names = [service.name for service in place]
        console.print(f"changes {', '.join(names)}")
        await launcher.stop(names)
        await launcher.start(place)
        await unless_failed(launcher, again(names))


def _console() -> Console:
    """Returns a console that survives a full disk and a terminal that is gone or stopped."""
    output = LogOutput(descriptor_of(sys.__stdout__))
    atexit.register(output.close)
    return Console(file=cast(TextIO, output))


async def _until_stopped(life: Coroutine[Any, Any, None], launcher: Launcher, console: Console) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await until_set(stop, life)
    finally:
        console.print("stopping")
        await launcher.stop()


async def _serve(settings: UpSettings, plan: ClusterPlan, launcher: Launcher, console: Console) -> None:
    def report(text: str) -> None:
        console.print(escape(text), style="yellow")

    async with on_demand(plan, launcher, report, settings.ready_timeout_s, bool(settings.ray)) as waking:
        await _start(settings, plan, launcher, console, waking)
        with noted(note_of(settings, plan)):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(launcher.watch(restart=True))
                if waking:
                    tasks.create_task(waking.run())


async def _start(
    settings: UpSettings, plan: ClusterPlan, launcher: Launcher, console: Console, waking: OnDemand | None = None
) -> None:
    """Start all services. One that ends before the cluster is ready ends it; later it is started again."""
    now = asyncio.get_running_loop().time
    started = now()
    await launcher.start([plan.kvstore])
    await unless_failed(launcher, _registry_answers(settings, plan.redis_url))
    await launcher.start(plan.workers)
    await launcher.start(plan.gateways)
    if waking:
        await waking.tell(settings.ready_timeout_s)
    plan = await unless_failed(launcher, _wait_until_ready(settings, plan, launcher, console))
    console.print(status(settings, plan, now() - started, await capacities(plan)))
    if settings.sample and not plan.cluster.gateway.settings.get("api_keys"):
        await stream_sample(settings, plan, console)
    console.print(lines_to_try(settings, plan), soft_wrap=True)


async def _registry_answers(settings: UpSettings, url: str) -> None:
    registry = Registry.connect(url)
    try:
        async with asyncio.timeout(settings.ready_timeout_s):
            while True:
                try:
                    return await registry.ping()
                except RegistryUnavailable:
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"{RedisAddress.parse(url)} does not answer; logs are in {settings.logs}") from None
    finally:
        await registry.close()


async def _wait_until_ready(
    settings: UpSettings, plan: ClusterPlan, launcher: Launcher, console: Console
) -> ClusterPlan:
    """Wait until each gateway reports every worker, and a real block moved over every prefill-decode pair.

    Returns:
        The plan with each gateway's host.
    """
    missing = "no gateway answers"
    try:
        async with asyncio.timeout(settings.ready_timeout_s), http_client(2.0) as client:
            with Live(console=console, refresh_per_second=8, transient=True) as live:
                pinned = (model.name for model in plan.cluster.models if not model.idle)
                expected = {name: plan.cluster.expected(name) for name in pinned}
                for gateway in plan.gateways:
                    port = "own_http_port" if "own_http_port" in gateway.settings else "http_port"
                    while missing := await _missing(client, plan.url(gateway, port), expected):
                        live.update(progress(launcher))
                        await asyncio.sleep(0.1)
                        plan = replace(plan, hosts=await launcher.hosts())
    except TimeoutError:
        raise TimeoutError(
            f"not ready after {settings.ready_timeout_s:.0f} s: {missing}; logs are in {settings.logs}"
        ) from None
    return plan


async def _missing(client: httpx.AsyncClient, address: str, expected: dict[str, dict[str, int]]) -> str:
    """Returns what a gateway still lacks, or "". `expected`: numbers of workers by model and role."""
    try:
        answer = await client.get(f"http://{address}/health/ready")
    except httpx.TransportError:
        return f"the gateway at {address} does not answer"
    found = answer.json()["models"] if answer.status_code == 200 else {}
    counted = ((model, what, count) for model, counts in expected.items() for what, count in counts.items())
    ready = found and all(found.get(model, {}).get(what, -1) >= count for model, what, count in counted)
    return "" if ready else answer.text
