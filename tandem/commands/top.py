"""`tandem top`: a cluster live in a terminal, from its registry and its gateways. Ctrl-C ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.gateways import http_client
from tandem.commands.clusters.own_cluster import with_own_password
from tandem.registry import GatewayAddress, LiveWorker, Registry, RegistryUnavailable, Role
from tandem.settings import Settings, load

ANSWER_WAIT_S = 2.0
# The most workers shown; of more, the busiest.
MAX_ROWS = 40


class TopSettings(Settings):
    """Show the workers, links and gateways of a running cluster, live."""

    redis_url: str = Field(UP_ADDRESSES["redis_url"], description="the registry")
    namespace: str = Field("tandem", min_length=1, description="prefix of its keys: one per cluster")
    every_s: float = Field(1.0, ge=0.1, description="time from one look to the next")
    looks: int | None = Field(None, ge=1, description="end after so many; if not given, on Ctrl-C")


@dataclass(frozen=True, slots=True)
class _Look:
    """The cluster at one moment. `loads`: requests at each gateway, None for one that does not answer."""

    workers: Sequence[LiveWorker]
    gateways: Sequence[GatewayAddress]
    loads: Sequence[int | None]


def main(arguments: list[str]) -> None:
    settings = load(TopSettings, arguments, "tandem top")
    try:
        asyncio.run(_run(settings))
    except ValueError as error:
        raise SystemExit(f"tandem top: {error}") from None


async def _run(settings: TopSettings) -> None:
    registry = Registry.connect(with_own_password(settings.redis_url), namespace=settings.namespace)
    console, looks = Console(), 0
    try:
        async with http_client(ANSWER_WAIT_S) as client:
            with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while settings.looks is None or looks < settings.looks:
                    if looks:
                        await asyncio.sleep(settings.every_s)
                    looks += 1
                    live.update(await _shown(registry, client), refresh=True)
    finally:
        await registry.close()


async def _shown(registry: Registry, client: httpx.AsyncClient) -> RenderableType:
    try:
        workers, gateways = await registry.workers(), await registry.gateways.live()
    except RegistryUnavailable as error:
        return Text(f"the registry does not answer: {error}", style="red")
    loads = await asyncio.gather(*(_load_of(client, one) for one in gateways))
    return render(_Look(workers, gateways, loads))


async def _load_of(client: httpx.AsyncClient, gateway: GatewayAddress) -> int | None:
    try:
        answer = await client.get(f"http://{gateway.own_http or gateway.http}/load")
        return int(answer.raise_for_status().json()["server_load"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def render(look: _Look) -> RenderableType:
    return Group(_gateways(look), _workers(look.workers), Text(_left_out(look.workers), style="dim"))


def _gateways(look: _Look) -> Table:
    table = Table("gateway", "model", "http", "requests", box=None, header_style="bold", expand=False)
    for number, (gateway, load_) in enumerate(zip(look.gateways, look.loads, strict=True)):
        said = "[red]no answer[/]" if load_ is None else str(load_)
        table.add_row(str(number), gateway.model, gateway.own_http or gateway.http, said)
    return table


def _workers(workers: Sequence[LiveWorker]) -> Table:
    columns = ("worker", "state", "model", "running", "waiting", "queued", "KV", "tokens/s", "links")
    table = Table(*columns, box=None, header_style="bold", expand=False)
    decodes = {worker.info.incarnation for worker in workers if worker.info.role is Role.DECODE}
    for worker in shown_first(workers):
        table.add_row(*_row(worker, decodes))
    return table


def shown_first(workers: Sequence[LiveWorker]) -> list[LiveWorker]:
    """Returns workers by role and name; of very many the busiest."""
    busiest = sorted(workers, key=lambda worker: -worker.load.num_running - worker.load.num_waiting)[:MAX_ROWS]
    return sorted(busiest, key=lambda worker: (worker.info.role.value, worker.info.worker_id))


def _row(worker: LiveWorker, decodes: set[str]) -> Sequence[Any]:
    info, load_ = worker.info, worker.load
    used = 1 - load_.free_blocks / max(1, info.num_blocks)
    links = f"{len(decodes.intersection(load_.linked))} of {len(decodes)}" if info.role is Role.PREFILL else ""
    state = "[red]stuck[/]" if load_.stuck else "[yellow]draining[/]" if load_.draining else "[green]serving[/]"
    return (
        info.title, state, info.model, str(load_.num_running), str(load_.num_waiting), str(load_.queued_tokens),
        f"{used:.0%}", _rate(worker), links,
    )  # fmt: skip


def _rate(worker: LiveWorker) -> str:
    """Returns a worker's recent rate: prompt tokens of a prefill worker, generated tokens of a decode worker."""
    load_ = worker.load
    if worker.info.role is Role.PREFILL:
        return f"{load_.prefill_tokens_per_s:,.0f}"
    return f"{load_.num_running / load_.step_s:,.0f}" if load_.step_s else ""


def _left_out(workers: Sequence[LiveWorker]) -> str:
    more = len(workers) - MAX_ROWS
    return f"and {more} less busy workers" if more > 0 else ""
