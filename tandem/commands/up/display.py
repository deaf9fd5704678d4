"""Prints for `tandem up`: the cluster as it runs, one answer, and lines to try."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tandem.commands import generate
from tandem.commands.clusters import REDIS_URL_FILE
from tandem.commands.clusters.gateways import http_client
from tandem.commands.clusters.own_cluster import registry_name
from tandem.commands.up.plan import ClusterPlan
from tandem.commands.up_options import UpSettings
from tandem.local import Launcher
from tandem.registry import RedisAddress

SAMPLE_TOKENS = 96


def progress(launcher: Launcher) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, (done, total) in launcher.loading().items():
        bar = f"{'█' * (20 * done // total):░<20} weights" if total and done < total else "starting"
        table.add_row(name, "up" if total and done >= total else bar)
    return table


async def capacities(plan: ClusterPlan) -> dict[str, str]:
    """Returns by model how many answers and tokens its decode workers hold concurrently."""
    at_once = {}
    async with http_client(2.0) as client:
        with suppress(httpx.HTTPError):
            found = (await client.get(f"http://{plan.url(plan.gateways[0])}/health/ready")).json()
            for model, said in found["models"].items():
                at_once[model] = f"{said['sequences']:,} answers, {said['kv_tokens']:,} tokens of KV; more wait"
                if said.get("state") == "asleep":
                    at_once[model] = "none: it sleeps until it is asked for"
    return at_once


def note_of(settings: UpSettings, plan: ClusterPlan) -> dict[str, str]:
    """Returns the cluster's note for `tandem ps`."""
    return {
        "model": ", ".join(model.name for model in plan.cluster.models),
        "http": ", ".join(dict.fromkeys(f"http://{plan.url(gateway)}" for gateway in plan.gateways)),
        "grpc": ", ".join(dict.fromkeys(plan.url(gateway, "grpc_port") for gateway in plan.gateways)),
        "workers": ", ".join(pool.text for pool in plan.cluster.pools),
        "logs": str(settings.logs.absolute()),
        "registry": registry_name(plan.redis_url, plan.cluster.namespace),
    }


def status(settings: UpSettings, plan: ClusterPlan, seconds: float, capacities: Mapping[str, str]) -> Panel:
    table = Table.grid(padding=(0, 2))
    for model in plan.cluster.models:
        table.add_row("model", f"{model.name}  ({model.weights.url or model.weights.path})")
        if model.name in capacities:
            table.add_row("at once", capacities[model.name])
    pools = (pool.text for pool in plan.cluster.pools)
    engine = ", null engine: no model computes" if settings.engine == "null" else ""
    table.add_row("workers", ", ".join(pools) + engine)
    for http in dict.fromkeys(plan.url(gateway) for gateway in plan.gateways):
        at = [gateway for gateway in plan.gateways if plan.url(gateway) == http]
        shared = f"  ({len(at)} processes)" if len(at) > 1 else ""
        table.add_row("OpenAI HTTP", f"http://{http}/v1{shared}")
        table.add_row("gRPC", f"{plan.url(at[0], 'grpc_port')}  (tandem.v1.LLMService)")
        own = [plan.url(gateway, "own_http_port") for gateway in at if "own_http_port" in gateway.settings]
        if own:
            table.add_row("metrics", ", ".join(f"http://{address}/metrics" for address in own))
    table.add_row("Redis", f"{RedisAddress.parse(plan.redis_url)}, namespace {plan.cluster.namespace}")
    if (url := settings.logs / REDIS_URL_FILE).exists():
        table.add_row("", f"its URL, with the password: {url}")
    table.add_row("logs", "with Ray's" if settings.ray else str(settings.logs))
    return Panel(table, title=f"Tandem is ready after {seconds:.1f} s", title_align="left", expand=False)


async def stream_sample(settings: UpSettings, plan: ClusterPlan, console: Console) -> None:
    address = plan.url(plan.gateways[0], "grpc_port")
    console.print()
    await generate.run([settings.sample, f"--address={address}", f"--max-tokens={SAMPLE_TOKENS}", "--temperature=0"])
    console.print()


def command(name: str) -> str:
    """Returns the shell command that runs `name`, python or tandem, of this environment."""
    here = Path(sys.executable).with_name(name)
    on_path = shutil.which(name)
    return name if on_path and Path(on_path).absolute() == here else os.path.relpath(here)


def lines_to_try(settings: UpSettings, plan: ClusterPlan) -> str:
    gateway, closed = plan.gateways[0], plan.cluster.gateway.settings.get("api_keys")
    http, name = f"http://{plan.url(gateway)}/v1", plan.cluster.models[0].name
    key = ("-H 'authorization: Bearer tk-...' ", "tk-...", " --api-key tk-...") if closed else ("", "none", "")
    python, tandem = command("python"), command("tandem")
    down = f"{tandem} down --ray {settings.ray}     # stops everything"
    end = down if settings.detach else "Ctrl-C stops everything."
    return escape(f"""Try it from another terminal:

  curl {http}/completions -H 'content-type: application/json' {key[0]}\
-d '{{"model": "{name}", "prompt": "import ", "max_tokens": 32}}'

  {python} -c "from openai import OpenAI; c = OpenAI(base_url='{http}', api_key='{key[1]}'); \\
print(c.completions.create(model='{name}', prompt='def ', max_tokens=32).choices[0].text)"

  {tandem} generate "class " --address {plan.url(gateway, "grpc_port")}{key[2]}     # gRPC

  {tandem} chat --url {http.removesuffix("/v1")}{key[2]}     # talk to it

  {http.removesuffix("/v1")}/docs  describes every field of a request

{end}""")
