"""`tandem up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal

import httpx
from pydantic import ByteSize, Field
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tandem.api_keys import check_exposed
from tandem.local import Launcher, LocalLauncher, Service, ServiceFailed, check_free, unless_failed
from tandem.local.cluster import Cluster, Model, check_settings, read_cluster
from tandem.registry import RedisAddress, Registry, RegistryUnavailable
from tandem.security import ClusterSettings
from tandem.settings import load

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo" / "target"
SAMPLE_TOKENS = 96
# Options that say how, not what: a file leaves them to the command line.
BESIDE_FILE = {"file", "ray", "ray_namespace", "detach", "logs", "ready_timeout_s", "sample"}
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
    gateways: int = Field(1, ge=1, description="number of gateway processes, which share the ports")
    host: str = Field("127.0.0.1", description="address that the gateway listens on")
    api_keys: Path | None = Field(
        None, description="file of API keys, as `tandem keys` writes it; none: anyone may ask"
    )
    insecure: bool = Field(False, description="serve anyone who reaches the gateway, without API keys")
    http_port: int = Field(8000, ge=1, le=65535, description="port of the OpenAI-compatible HTTP API")
    grpc_port: int = Field(50051, ge=1, le=65535, description="port of the gRPC API")
    own_http_port: int | None = Field(
        None, ge=1, le=65535,
        description="several gateways' own ports, for metrics, count up from it (default: http-port + 1)",
    )  # fmt: skip
    redis_port: int = Field(6380, ge=1, le=65535, description="port of the redis-server started here")
    redis_url: str = Field("", description="use this Redis instead of starting one")
    engine: Literal["model", "null"] = Field(
        "model", description="null: workers that compute nothing and take a stated time for it"
    )
    null_speedup: float = Field(1.0, gt=0, description="null engine: divides the time that its steps take")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: as the weights are")
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none", description="what weights are made when loaded: 8 or 4 bits a number; fp8 on GPUs"
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto", description="what KV is held and moved in; auto: what the model computes in"
    )
    transports: str = Field("shm,tcp", description="how KV may move, best first")
    disaggregation: Literal["require", "prefer", "auto"] = Field(
        "auto", description="who reads prompts: prefill workers, those if there are any, or what costs less"
    )
    tool_parser: Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"] = Field(
        "auto", description="how the model writes calls of tools; auto: as its chat template shows"
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = Field(
        "auto", description="what the model writes around its thoughts; auto: as its chat template shows"
    )
    prefill_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each prefill worker; if not given, 256MiB, or 4MiB with the null engine"
    )
    decode_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each decode worker; if not given, 512MiB, or 8MiB with the null engine"
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus answer; if not given, the model's")
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="sequences a worker runs at once; if not given, as many as a step and its memory hold",
    )
    speculative_method: Literal["none", "ngram", "draft", "medusa", "eagle", "eagle3"] = Field(
        "none", description="what proposes tokens ahead: what followed earlier in the text, a draft model, or heads"
    )
    speculative_num_tokens: int | None = Field(None, ge=0, description="most tokens proposed in a step")
    speculative_model: Path | None = Field(
        None, description="folder of a draft model with the same vocabulary, or of heads"
    )
    lora_dir: Path | None = Field(None, description="folder that LoRA adapters (PEFT) are loaded from")
    threads: int | None = Field(None, ge=1, description="CPU threads per worker; if not given, cores / workers")
    drain_s: float = Field(30.0, ge=0, description="on SIGTERM, time for what a worker runs to end; then it moves")
    file: Path | None = Field(None, description="a cluster.yaml that says what runs, instead of options; docs/ray.md")
    ray: str = Field("", description="run on the Ray cluster at this address; auto: the one of this machine")
    ray_namespace: str = Field("tandem", min_length=1, description="Ray's name for this cluster's actors")
    detach: bool = Field(False, description="with --ray: leave the cluster running, or change the one that runs")
    logs: Path = Field(Path(".run/logs"), description="folder for the processes' logs")
    ready_timeout_s: float = Field(120.0, gt=0, description="how long the cluster may take to become ready")
    sample: str = Field("", description="a prompt to stream one answer for when ready")

    def cluster(self) -> Cluster:
        """
        Raises:
            ValueError: the file, or an option beside it, is wrong.
        """
        if self.file is not None:
            if beside := sorted(self.model_fields_set - BESIDE_FILE):
                options = ", ".join(f"--{name.replace('_', '-')}" for name in beside)
                raise ValueError(f"{options}: --file says what runs; set it there")
            return read_cluster(self.file)
        weights = {"path": self.model_path}
        gateway = {
            "host", "http_port", "grpc_port", "disaggregation", "api_keys", "insecure", "tool_parser",
            "reasoning_parser",
        }  # fmt: skip
        return Cluster.model_validate(
            {
                "models": [{"id": "model", "name": self.served_name, "weights": weights}],
                "workers": {"settings": self._worker_settings()},
                "pools": [
                    self._pool("prefill", self.prefill, self.prefill_kv_memory),
                    self._pool("decode", self.decode, self.decode_kv_memory),
                ],
                "gateway": {
                    "replicas": self.gateways,
                    "settings": self.model_dump(include=gateway, exclude_none=True) | self._own_ports(),
                },
                "redis": {"url": self.redis_url, "port": self.redis_port},
                "security": self.model_dump(include=set(ClusterSettings.model_fields), exclude_none=True),
            }
        )

    def _own_ports(self) -> dict[str, object]:
        if self.own_http_port is None and self.gateways == 1:
            return {}
        return {"own_http_port": self.own_http_port or self.http_port + 1}

    @property
    def served_name(self) -> str:
        return self.model_name or ("tandem-demo" if self.model_path == DEMO_MODEL else self.model_path.resolve().name)

    def _worker_settings(self) -> dict[str, object]:
        fields = {
            "engine",
            "dtype",
            "quantization",
            "kv_cache_dtype",
            "lora_dir",
            "max_num_seqs",
            "null_speedup",
            "max_model_len",
            "threads",
            "drain_s",
        }
        return self.model_dump(include=fields, exclude_none=True) | {"transports": self.transports.split(",")}

    def _pool(self, role: str, replicas: int, memory: ByteSize | None) -> dict[str, object]:
        settings: dict[str, object] = {"kv_memory": int(memory or KV_MEMORY[self.engine, role])}
        if role == "decode":
            speculative = {"speculative_method", "speculative_num_tokens", "speculative_model"}
            settings |= self.model_dump(include=speculative, exclude_none=True)
        return {"name": role, "role": role, "model": "model", "replicas": replicas, "settings": settings}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started, in this order, and where it will answer."""

    cluster: Cluster
    redis_url: str
    kvstore: Service
    workers: list[Service]
    gateways: list[Service]

    def url(self, gateway: Service, port: str = "http_port") -> str:
        host = str(gateway.settings.get("host", "127.0.0.1"))
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{gateway.settings[port]}"


def main(arguments: list[str]) -> None:
    settings = load(UpSettings, _with_ray_address(arguments), "tandem up")
    try:
        cluster = settings.cluster()
        _check(settings, cluster)
        asyncio.run(_up_on_ray(settings, cluster) if settings.ray else _up_here(settings, cluster))
    except (ServiceFailed, ConnectionError, TimeoutError, ValueError) as error:
        raise SystemExit(f"tandem up: {error}") from None


def _with_ray_address(arguments: list[str]) -> list[str]:
    """`--ray` alone is `--ray auto`."""
    following = [*arguments[1:], "--"]
    return [
        "--ray=auto" if argument == "--ray" and after.startswith("-") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def _check(settings: UpSettings, cluster: Cluster) -> None:
    for model in cluster.models:
        _check_model(settings, cluster, model)
    if settings.file is not None:
        _check_settings(cluster)
    gateway = cluster.gateway.settings
    check_exposed(gateway.get("host", "127.0.0.1"), gateway.get("api_keys"), bool(gateway.get("insecure")))
    if settings.detach and not settings.ray:
        raise ValueError("--detach: only a cluster on Ray can be left running; add --ray")
    if not settings.detach:
        check_free(cluster.addresses())


def _check_model(settings: UpSettings, cluster: Cluster, model: Model) -> None:
    name, folder = f"models.{model.id}.weights.path" if settings.file else "--model-path", model.weights.path
    if model.weights.kind == "runtime_env":
        if not settings.ray:
            raise ValueError(f"models.{model.id}.weights.kind: runtime_env is Ray's; add --ray")
        brought = Path(cluster.ray.runtime_env["working_dir"])
        if not brought.is_dir():
            return  # a zip, somewhere: the workers see what is in it
        folder = brought / folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}: {folder} is no Hugging Face folder: it has no config.json")


def _check_settings(cluster: Cluster) -> None:
    from services.gateway.settings import GatewaySettings
    from tandem.worker import WorkerSettings

    check_settings([(f"pools.{pool.name}.settings", pool.settings) for pool in cluster.pools], WorkerSettings)
    check_settings([("gateway.settings", cluster.gateway.settings)], GatewaySettings)


async def _up_here(settings: UpSettings, cluster: Cluster) -> None:
    cores = settings.logs / "cores"
    shutil.rmtree(cores, ignore_errors=True)
    redis_url = cluster.redis.url or f"redis://127.0.0.1:{cluster.redis.port}"
    workers = cluster.worker_services(redis_url, cores)
    plan = Plan(cluster, redis_url, cluster.kvstore_service(), workers, cluster.gateway_services(redis_url))
    console = Console()
    launcher = LocalLauncher(settings.logs, lambda text: console.print(escape(text), style="yellow"))
    await _until_stopped(_serve(settings, plan, launcher, console), launcher, console)


async def _up_on_ray(settings: UpSettings, cluster: Cluster) -> None:
    from tandem.local.ray import RayLauncher, connect, kvstore_on_ray, service_address

    connect(settings.ray, settings.ray_namespace, cluster.ray.runtime_env)
    console = Console()
    launcher = RayLauncher(lambda text: console.print(escape(text), style="yellow"), detached=settings.detach)
    kvstore = await launcher.kvstore() or kvstore_on_ray(cluster)
    redis_url = service_address(kvstore)
    cores = Path(gettempdir()) / f"{settings.ray_namespace}-cores"  # of each node
    plan = Plan(
        cluster, redis_url, kvstore, cluster.worker_services(redis_url, cores), cluster.gateway_services(redis_url)
    )
    if not settings.detach:
        await _until_stopped(_serve(settings, plan, launcher, console), launcher, console)
        return
    before = launcher.names
    try:
        await _start(settings, plan, launcher, console)
    except ServiceFailed:
        await launcher.stop(launcher.names - before)
        raise
    wanted = {service.name for service in (plan.kvstore, *plan.workers, *plan.gateways)}
    await launcher.stop(launcher.names - wanted)


async def _until_stopped(life: Coroutine[Any, Any, None], launcher: Launcher, console: Console) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    living, stopped = asyncio.create_task(life), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((living, stopped), return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()
    finally:
        for task in (living, stopped):
            task.cancel()
        await asyncio.gather(living, stopped, return_exceptions=True)
        console.print("stopping")
        await launcher.stop()


async def _serve(settings: UpSettings, plan: Plan, launcher: Launcher, console: Console) -> None:
    await _start(settings, plan, launcher, console)
    await launcher.watch(restart=True)


async def _start(settings: UpSettings, plan: Plan, launcher: Launcher, console: Console) -> None:
    """A service that ends before the cluster is ready ends it; from then on it is started again."""
    now = asyncio.get_running_loop().time
    started = now()
    await launcher.start([plan.kvstore])
    await unless_failed(launcher, _registry_answers(settings, plan.redis_url))
    await launcher.start(plan.workers)
    await launcher.start(plan.gateways)
    await unless_failed(launcher, _wait_until_ready(settings, plan, launcher, console))
    console.print(_status(settings, plan, now() - started, await _capacities(plan)))
    if settings.sample and not plan.cluster.gateway.settings.get("api_keys"):
        await _stream_sample(settings, plan, console)
    console.print(_lines_to_try(settings, plan), soft_wrap=True)


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


async def _wait_until_ready(settings: UpSettings, plan: Plan, launcher: Launcher, console: Console) -> None:
    """Until each gateway says that every worker is there and every prefill-decode pair has moved a real block."""
    missing = "no gateway answers"
    try:
        async with asyncio.timeout(settings.ready_timeout_s), httpx.AsyncClient(timeout=2.0) as client:
            with Live(console=console, refresh_per_second=8, transient=True) as live:
                for gateway in plan.gateways:
                    expected = plan.cluster.expected(str(gateway.settings["model_name"]))
                    port = "own_http_port" if "own_http_port" in gateway.settings else "http_port"
                    while missing := await _missing(client, plan.url(gateway, port), expected):
                        live.update(_progress(launcher))
                        await asyncio.sleep(0.1)
    except TimeoutError:
        raise TimeoutError(
            f"not ready after {settings.ready_timeout_s:.0f} s: {missing}; logs are in {settings.logs}"
        ) from None


async def _missing(client: httpx.AsyncClient, address: str, expected: dict[str, int]) -> str:
    try:
        answer = await client.get(f"http://{address}/health/ready")
    except httpx.TransportError:
        return f"the gateway at {address} does not answer"
    ready = answer.status_code == 200 and all(answer.json()[name] >= count for name, count in expected.items())
    return "" if ready else answer.text


def _progress(launcher: Launcher) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, (done, total) in launcher.loading().items():
        bar = f"{'█' * (20 * done // total):░<20} weights" if total and done < total else "starting"
        table.add_row(name, "up" if total and done >= total else bar)
    return table


async def _capacities(plan: Plan) -> dict[str, str]:
    """By model, how much of it decode workers run and hold at once."""
    at_once = {}
    async with httpx.AsyncClient(timeout=2.0) as client:
        for gateway in plan.gateways:
            with suppress(httpx.HTTPError):
                said = (await client.get(f"http://{plan.url(gateway)}/health/ready")).json()
                text = f"{said['sequences']:,} answers, {said['kv_tokens']:,} tokens of KV; more wait"
                at_once[str(gateway.settings["model_name"])] = text
    return at_once


def _status(settings: UpSettings, plan: Plan, seconds: float, capacities: Mapping[str, str]) -> Panel:
    table = Table.grid(padding=(0, 2))
    for model in plan.cluster.models:
        table.add_row("model", f"{model.name}  ({model.weights.path})")
        if model.name in capacities:
            table.add_row("at once", capacities[model.name])
    pools = (f"{pool.replicas} {pool.name}" for pool in plan.cluster.pools)
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
    table.add_row("Redis", str(RedisAddress.parse(plan.redis_url)))
    table.add_row("logs", "with Ray's" if settings.ray else str(settings.logs))
    return Panel(table, title=f"Tandem is ready after {seconds:.1f} s", title_align="left", expand=False)


async def _stream_sample(settings: UpSettings, plan: Plan, console: Console) -> None:
    from tandem.commands import generate

    address = plan.url(plan.gateways[0], "grpc_port")
    console.print()
    await generate.run([settings.sample, f"--address={address}", f"--max-tokens={SAMPLE_TOKENS}", "--temperature=0"])
    console.print()


def _lines_to_try(settings: UpSettings, plan: Plan) -> str:
    gateway, closed = plan.gateways[0], plan.cluster.gateway.settings.get("api_keys")
    http, name = f"http://{plan.url(gateway)}/v1", gateway.settings["model_name"]
    key = ("-H 'authorization: Bearer tk-...' ", "tk-...", " --api-key tk-...") if closed else ("", "none", "")
    end = f"tandem down --ray {settings.ray}     (stops everything)" if settings.detach else "Ctrl-C stops everything."
    return escape(f"""Try it from another terminal:

  curl {http}/completions -H 'content-type: application/json' {key[0]}\
    -d '{{"model": "{name}", "prompt": "import ", "max_tokens": 32}}'

  python -c "from openai import OpenAI; c = OpenAI(base_url='{http}', api_key='{key[1]}'); \\
print(c.completions.create(model='{name}', prompt='def ', max_tokens=32).choices[0].text)"

  tandem generate "class " --address {plan.url(gateway, "grpc_port")}{key[2]}     (gRPC)

{end}""")
