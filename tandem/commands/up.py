"""`tandem up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Literal

import httpx
from pydantic import ByteSize, Field
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tandem.api_keys import check_exposed
from tandem.local import Launcher, LocalLauncher, Service, ServiceFailed, check_free, unless_failed
from tandem.registry import Registry, RegistryUnavailable
from tandem.security import ClusterSettings
from tandem.settings import load

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo" / "target"
SAMPLE_TOKENS = 96
KV_MEMORY = {
    ("model", "prefill"): ByteSize(256 * 2**20), ("model", "decode"): ByteSize(512 * 2**20),
    ("null", "prefill"): ByteSize(4 * 2**20), ("null", "decode"): ByteSize(8 * 2**20),
}  # fmt: skip


class UpSettings(ClusterSettings):
    """Start a Tandem cluster on this machine: Redis, a gateway, prefill and decode workers, each a process."""

    model_path: Path = Field(DEMO_MODEL, description="Hugging Face folder of the model")
    model_name: str = Field("", description="name to serve it under; if not given, tandem-demo or the folder's name")
    prefill: int = Field(1, ge=0, description="number of prefill workers")
    decode: int = Field(1, ge=1, description="number of decode workers")
    host: str = Field("127.0.0.1", description="address that the gateway listens on")
    api_keys: Path | None = Field(
        None, description="file of API keys, as `tandem keys` writes it; none: anyone may ask"
    )
    insecure: bool = Field(False, description="serve anyone who reaches the gateway, without API keys")
    http_port: int = Field(8000, ge=1, le=65535, description="port of the OpenAI-compatible HTTP API")
    grpc_port: int = Field(50051, ge=1, le=65535, description="port of the gRPC API")
    redis_port: int = Field(6380, ge=1, le=65535, description="port of the redis-server started here")
    redis_url: str = Field("", description="use this Redis instead of starting one")
    engine: Literal["model", "null"] = Field(
        "model", description="null: workers that compute nothing and take a stated time for it"
    )
    null_speedup: float = Field(1.0, gt=0, description="null engine: divides the time that its steps take")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: as the weights are")
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="what weights are made when loaded: 8 or 4 bits a number"
    )
    transports: str = Field("shm,tcp", description="how KV may move, best first")
    disaggregation: Literal["require", "prefer", "auto"] = Field(
        "auto", description="who reads prompts: prefill workers, those if there are any, or whoever costs less"
    )
    prefill_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each prefill worker; if not given, 256MiB, or 4MiB with the null engine"
    )
    decode_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each decode worker; if not given, 512MiB, or 8MiB with the null engine"
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus answer; if not given, the model's")
    max_num_seqs: int = Field(256, ge=1, description="sequences in one step of a worker")
    speculative_method: Literal["none", "ngram", "draft"] = Field(
        "none", description="what proposes tokens ahead: what followed earlier in the text, or a draft model"
    )
    speculative_num_tokens: int | None = Field(None, ge=0, description="most tokens proposed in a step")
    speculative_model: Path | None = Field(None, description="folder of a draft model with the same vocabulary")
    threads: int | None = Field(None, ge=1, description="CPU threads per worker; if not given, cores / workers")
    drain_s: float = Field(30.0, ge=0, description="on SIGTERM, time for what a worker runs to end; then it moves")
    logs: Path = Field(Path(".run/logs"), description="folder for the processes' logs")
    ready_timeout_s: float = Field(120.0, gt=0, description="how long the cluster may take to become ready")
    sample: str = Field("", description="a prompt to stream one answer for when ready")

    @property
    def served_name(self) -> str:
        return self.model_name or ("tandem-demo" if self.model_path == DEMO_MODEL else self.model_path.resolve().name)

    @property
    def registry_url(self) -> str:
        return self.redis_url or f"redis://127.0.0.1:{self.redis_port}"

    @property
    def reachable_host(self) -> str:
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host


def main(arguments: list[str]) -> None:
    settings = load(UpSettings, arguments, "tandem up")
    if not (settings.model_path / "config.json").is_file():
        raise SystemExit(f"--model-path: {settings.model_path} is no Hugging Face folder: it has no config.json")
    try:
        check_exposed(settings.host, settings.api_keys, settings.insecure)
        check_free(_addresses(settings))
        asyncio.run(_up(settings))
    except (ServiceFailed, TimeoutError, ValueError) as error:
        raise SystemExit(f"tandem up: {error}") from None


def _addresses(settings: UpSettings) -> dict[str, tuple[str, int]]:
    """What will be listened on, by the option that says so."""
    addresses = {"--http-port": (settings.host, settings.http_port), "--grpc-port": (settings.host, settings.grpc_port)}
    return addresses if settings.redis_url else {**addresses, "--redis-port": ("127.0.0.1", settings.redis_port)}


def kvstore(settings: UpSettings) -> Service:
    redis = {"redis_url": settings.redis_url} if settings.redis_url else {"redis_port": settings.redis_port}
    return Service("kvstore", "services.kvstore", {**redis, "grpc_port": 0, **_security(settings)})


def gateway(settings: UpSettings) -> Service:
    own = settings.model_dump(
        include={"host", "http_port", "grpc_port", "disaggregation", "api_keys", "insecure"}, exclude_none=True
    )
    return Service("gateway", "services.gateway", {**_shared(settings), **own})


def workers(settings: UpSettings) -> list[Service]:
    cores = settings.logs / "cores"
    shutil.rmtree(cores, ignore_errors=True)
    threads = settings.threads or max(1, (os.cpu_count() or 1) // (settings.prefill + settings.decode))
    same = _shared(settings)
    same |= settings.model_dump(include={"engine", "dtype", "quantization", "transports", "max_num_seqs", "drain_s"})
    same |= settings.model_dump(include={"null_speedup", "max_model_len"}, exclude_none=True)
    same |= {"threads": threads, "shared_cores": cores}
    pools = {
        "prefill": (settings.prefill, settings.prefill_kv_memory),
        "decode": (settings.decode, settings.decode_kv_memory),
    }
    speculative = {"speculative_method", "speculative_num_tokens", "speculative_model"}
    only = {"prefill": {}, "decode": settings.model_dump(include=speculative, exclude_none=True)}

    def worker(role: str, number: int, memory: ByteSize) -> Service:
        its = {"worker_id": f"{role}-{number}", "kv_memory": int(memory), **only[role]}
        return Service(f"{role}-{number}", f"services.{role}", same | its, threads)

    return [
        worker(role, number, memory or KV_MEMORY[settings.engine, role])
        for role, (count, memory) in pools.items()
        for number in range(count)
    ]


def _shared(settings: UpSettings) -> dict[str, object]:
    return {
        "model_path": settings.model_path, "model_name": settings.served_name, "redis_url": settings.registry_url,
        **_security(settings),
    }  # fmt: skip


def _security(settings: UpSettings) -> dict[str, object]:
    return settings.model_dump(include=set(ClusterSettings.model_fields), exclude_none=True)


async def _up(settings: UpSettings) -> None:
    console = Console()
    launcher = LocalLauncher(settings.logs, lambda text: console.print(escape(text), style="yellow"))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    life = asyncio.create_task(_serve(settings, launcher, console))
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
        await launcher.stop()


async def _serve(settings: UpSettings, launcher: Launcher, console: Console) -> None:
    """A service that ends before the cluster is ready ends it; from then on it is started again."""
    now = asyncio.get_running_loop().time
    started = now()
    await launcher.start([kvstore(settings)])
    await unless_failed(launcher, _registry_answers(settings))
    await launcher.start(workers(settings))
    await launcher.start([gateway(settings)])
    await unless_failed(launcher, _wait_until_ready(settings, launcher, console))
    console.print(_status(settings, now() - started))
    if settings.sample and not settings.api_keys:
        await _stream_sample(settings, console)
    console.print(_lines_to_try(settings), soft_wrap=True)
    await launcher.watch(restart=True)


async def _registry_answers(settings: UpSettings) -> None:
    registry = Registry.connect(settings.registry_url)
    try:
        async with asyncio.timeout(settings.ready_timeout_s):
            while True:
                try:
                    return await registry.ping()
                except RegistryUnavailable:
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"{settings.registry_url} does not answer; logs are in {settings.logs}") from None
    finally:
        await registry.close()


async def _wait_until_ready(settings: UpSettings, launcher: Launcher, console: Console) -> None:
    """Until the gateway says that every worker is there and every prefill-decode pair has moved a real block."""
    url = f"http://{settings.reachable_host}:{settings.http_port}/health/ready"
    missing = "the gateway does not answer"
    try:
        async with asyncio.timeout(settings.ready_timeout_s), httpx.AsyncClient(timeout=2.0) as client:
            with Live(console=console, refresh_per_second=8, transient=True) as live:
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        answer = await client.get(url)
                        if answer.status_code == 200 and _whole(settings, answer.json()):
                            return
                        missing = answer.text
                    live.update(_progress(launcher))
                    await asyncio.sleep(0.1)
    except TimeoutError:
        raise TimeoutError(
            f"not ready after {settings.ready_timeout_s:.0f} s: {missing}; logs are in {settings.logs}"
        ) from None


def _whole(settings: UpSettings, found: dict[str, int]) -> bool:
    pairs = settings.prefill * settings.decode
    return found["decode_workers"] >= settings.decode and found["linked_pairs"] >= pairs


def _progress(launcher: Launcher) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, (done, total) in launcher.loading().items():
        bar = f"{'█' * (20 * done // total):░<20} weights" if total and done < total else "starting"
        table.add_row(name, "up" if total and done >= total else bar)
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

    options = [
        f"--address={settings.reachable_host}:{settings.grpc_port}",
        f"--max-tokens={SAMPLE_TOKENS}",
        "--temperature=0",
    ]
    console.print()
    await generate.run([settings.sample, *options])
    console.print()


def _lines_to_try(settings: UpSettings) -> str:
    http, name = f"http://{settings.host}:{settings.http_port}/v1", settings.served_name
    key = (
        ("-H 'authorization: Bearer tk-...' ", "tk-...", " --api-key tk-...") if settings.api_keys else ("", "none", "")
    )
    return escape(f"""Try it from another terminal:

  curl {http}/completions -H 'content-type: application/json' {key[0]}\
    -d '{{"model": "{name}", "prompt": "import ", "max_tokens": 32}}'

  python -c "from openai import OpenAI; c = OpenAI(base_url='{http}', api_key='{key[1]}'); \\
print(c.completions.create(model='{name}', prompt='def ', max_tokens=32).choices[0].text)"

  tandem generate "class " --address {settings.host}:{settings.grpc_port}{key[2]}     (gRPC)

Ctrl-C stops everything.""")
