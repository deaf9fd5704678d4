"""`tandem up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Literal

import httpx
from pydantic import ByteSize, Field
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tandem.clock import SystemClock
from tandem.local import Cluster, Process, ProcessFailed
from tandem.registry import Registry, RegistryUnavailable
from tandem.settings import Settings, load

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo" / "target"
SAMPLE_TOKENS = 96
KV_MEMORY = {
    ("model", "prefill"): ByteSize(256 * 2**20), ("model", "decode"): ByteSize(512 * 2**20),
    ("null", "prefill"): ByteSize(4 * 2**20), ("null", "decode"): ByteSize(8 * 2**20),
}  # fmt: skip


class UpSettings(Settings):
    """Start a Tandem cluster on this machine: Redis, a gateway, prefill and decode workers, each a process."""

    model_path: Path = Field(DEMO_MODEL, description="Hugging Face folder of the model")
    model_name: str = Field("", description="name to serve it under (default: tandem-demo, or the folder's name)")
    prefill: int = Field(1, ge=0, description="number of prefill workers")
    decode: int = Field(1, ge=1, description="number of decode workers")
    host: str = Field("127.0.0.1", description="address that the gateway listens on")
    http_port: int = Field(8000, ge=1, le=65535)
    grpc_port: int = Field(50051, ge=1, le=65535)
    redis_port: int = Field(6380, ge=1, le=65535, description="port of the redis-server started here")
    redis_url: str = Field("", description="use this Redis instead of starting one")
    engine: Literal["model", "null"] = Field(
        "model", description="null: workers that compute nothing and take a stated time for it; see their --help"
    )
    dtype: str = Field("auto", description="float32, bfloat16, or auto: as the weights are stored")
    transports: str = Field("shm,tcp", description="ways to move KV, best first")
    disaggregation: str = Field("auto", pattern="^(require|prefer|auto)$")
    prefill_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each prefill worker (default: 256MiB; null engine: 4MiB)"
    )
    decode_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each decode worker (default: 512MiB; null engine: 8MiB)"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per worker (default: cores / workers)")
    logs: Path = Field(Path(".run/logs"), description="folder for the processes' logs")
    ready_timeout_s: float = Field(120.0, gt=0)
    sample: str = Field("", description="a prompt to stream one answer for when ready")

    @property
    def served_name(self) -> str:
        return self.model_name or ("tandem-demo" if self.model_path == DEMO_MODEL else self.model_path.resolve().name)

    @property
    def registry_url(self) -> str:
        return self.redis_url or f"redis://127.0.0.1:{self.redis_port}"


def main(arguments: list[str]) -> None:
    settings = load(UpSettings, arguments, "tandem up")
    if not (settings.model_path / "config.json").is_file():
        raise SystemExit(f"model-path: {settings.model_path} is no Hugging Face folder: it has no config.json")
    try:
        asyncio.run(_up(settings))
    except (ProcessFailed, TimeoutError) as error:
        raise SystemExit(f"tandem up: {error}") from None


def processes(settings: UpSettings) -> list[list[Process]]:
    """The cluster's processes, stage by stage."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(settings.logs / "cores", ignore_errors=True)
    threads = settings.threads or max(1, (os.cpu_count() or 1) // (settings.prefill + settings.decode))

    def process(name: str, module: str, *arguments: str, restart: bool = False) -> Process:
        log_path = settings.logs / f"{name}.log"
        log_path.unlink(missing_ok=True)
        # Idle threads sleep: another worker's may need their core.
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        return Process(name, [module, *arguments], log_path, environment, restart)

    shared = [f"--model-path={settings.model_path}", f"--model-name={settings.served_name}"]
    shared += [f"--redis-url={settings.registry_url}"]
    worker = [f"--engine={settings.engine}", f"--dtype={settings.dtype}", f"--transports={settings.transports}"]
    worker += [f"--threads={threads}", f"--shared-cores={settings.logs / 'cores'}"]

    def workers(role: str, count: int, memory: ByteSize | None) -> list[Process]:
        memory = memory or KV_MEMORY[settings.engine, role]
        return [
            process(f"{role}-{i}", f"services.{role}", *shared, *worker, f"--worker-id={role}-{i}",
                    f"--kv-memory={int(memory)}", restart=True)
            for i in range(count)
        ]  # fmt: skip

    registry = f"--redis-url={settings.redis_url}" if settings.redis_url else f"--redis-port={settings.redis_port}"
    kvstore = process("kvstore", "services.kvstore", registry, "--grpc-port=0")
    gateway = process(
        "gateway", "services.gateway", *shared, f"--host={settings.host}", f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}", f"--disaggregation={settings.disaggregation}",
    )  # fmt: skip
    prefill = workers("prefill", settings.prefill, settings.prefill_kv_memory)
    decode = workers("decode", settings.decode, settings.decode_kv_memory)
    return [[kvstore], [*prefill, *decode], [gateway]]


async def _up(settings: UpSettings) -> None:
    console, started = Console(), time.monotonic()
    cluster = Cluster(processes(settings), SystemClock(), lambda text: console.print(escape(text), style="yellow"))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    life = asyncio.create_task(_serve(settings, cluster, console, started))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((life, stopped), return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
    finally:
        for task in (life, stopped):
            task.cancel()
        await asyncio.gather(life, stopped, return_exceptions=True)
        console.print("stopping")
        await cluster.stop()


async def _serve(settings: UpSettings, cluster: Cluster, console: Console, started: float) -> None:
    await cluster.start(
        lambda stage: asyncio.ensure_future(_registry_answers(settings, cluster) if stage == 0 else _now())
    )
    broken = asyncio.create_task(cluster.ended())
    ready = asyncio.create_task(_wait_until_ready(settings, cluster, console))
    await asyncio.wait((broken, ready), return_when=asyncio.FIRST_COMPLETED)
    if broken.done():
        ready.cancel()
        broken.result()
    ready.result()
    console.print(_status(settings, time.monotonic() - started))
    if settings.sample:
        await _stream_sample(settings, console)
    console.print(_lines_to_try(settings), soft_wrap=True)
    await broken


async def _now() -> None:
    return


async def _registry_answers(settings: UpSettings, cluster: Cluster) -> None:
    broken = asyncio.create_task(cluster.ended())
    registry = await Registry.connect(settings.registry_url, clock=SystemClock())
    try:
        async with asyncio.timeout(settings.ready_timeout_s):
            while not broken.done():
                try:
                    return await registry.ping()
                except RegistryUnavailable:
                    await asyncio.sleep(0.05)
        broken.result()
    finally:
        broken.cancel()
        await registry.close()


async def _wait_until_ready(settings: UpSettings, cluster: Cluster, console: Console) -> None:
    """Until the gateway says that every worker is there and every prefill-decode pair has moved a real block."""
    url = f"http://127.0.0.1:{settings.http_port}/health/ready"
    missing = "the gateway does not answer"
    async with httpx.AsyncClient(timeout=2.0) as client:
        with Live(console=console, refresh_per_second=8, transient=True) as live:
            end = time.monotonic() + settings.ready_timeout_s
            while time.monotonic() < end:
                try:
                    answer = await client.get(url)
                    if answer.status_code == 200 and _whole(settings, answer.json()):
                        return
                    missing = answer.text
                except httpx.TransportError:
                    missing = "the gateway does not answer"
                live.update(_progress(cluster))
                await asyncio.sleep(0.1)
    raise TimeoutError(f"not ready after {settings.ready_timeout_s:.0f} s: {missing}; logs are in {settings.logs}")


def _whole(settings: UpSettings, found: dict[str, int]) -> bool:
    pairs = settings.prefill * settings.decode
    return found["decode_workers"] >= settings.decode and found["linked_pairs"] >= pairs


def _progress(cluster: Cluster) -> Table:
    table = Table.grid(padding=(0, 2))
    for process in cluster.processes:
        done, total = process.loading
        bar = f"{'█' * (20 * done // total):░<20} weights" if total and done < total else "starting"
        table.add_row(process.name, "up" if total and done >= total else bar)
    return table


def _status(settings: UpSettings, seconds: float) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_row("model", f"{settings.served_name}  ({settings.model_path})")
    engine = ", null engine: no model computes" if settings.engine == "null" else ""
    table.add_row("workers", f"{settings.prefill} prefill, {settings.decode} decode{engine}")
    table.add_row("OpenAI HTTP", f"http://{settings.host}:{settings.http_port}/v1")
    table.add_row("gRPC", f"{settings.host}:{settings.grpc_port}  (tandem.v1.LLMService)")
    table.add_row("Redis", settings.registry_url)
    table.add_row("logs", str(settings.logs))
    return Panel(table, title=f"Tandem is ready after {seconds:.1f} s", title_align="left", expand=False)


async def _stream_sample(settings: UpSettings, console: Console) -> None:
    from tandem.commands import generate

    options = [f"--address=127.0.0.1:{settings.grpc_port}", f"--max-tokens={SAMPLE_TOKENS}", "--temperature=0"]
    console.print()
    await generate.run([settings.sample, *options])
    console.print()


def _lines_to_try(settings: UpSettings) -> str:
    http, name = f"http://{settings.host}:{settings.http_port}/v1", settings.served_name
    return escape(f"""Try it from another terminal:

  curl {http}/completions -H 'content-type: application/json' \
    -d '{{"model": "{name}", "prompt": "import ", "max_tokens": 32}}'

  python -c "from openai import OpenAI; c = OpenAI(base_url='{http}', api_key='none'); \\
print(c.completions.create(model='{name}', prompt='def ', max_tokens=32).choices[0].text)"

  tandem generate "class " --address {settings.host}:{settings.grpc_port}     (gRPC)

Ctrl-C stops everything.""")
