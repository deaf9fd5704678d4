"""The options of `tandem up`, which `tandem doctor --fit` also uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import CliPositionalArg, NoDecode

from tandem.checkpoints import MemoryNeed, ModelPath, as_folder, find_model, held_weights, misfit
from tandem.cluster import Cluster, read_cluster
from tandem.commands.clusters import LOGS
from tandem.machine.resources import usable_memory
from tandem.security import ClusterSettings

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo" / "target"
# Options about how a cluster runs, which stay on the command line when a file describes it.
BESIDE_FILE = {"file", "ray", "ray_namespace", "detach", "logs", "ready_timeout_s", "sample"}
KV_MEMORY = {
    ("model", "prefill"): ByteSize(256 * 2**20), ("model", "decode"): ByteSize(512 * 2**20),
    ("null", "prefill"): ByteSize(4 * 2**20), ("null", "decode"): ByteSize(8 * 2**20),
}  # fmt: skip


def _listed(given: Any) -> Any:
    """Returns the parts of options that were given several times, which arrive joined by commas."""
    return tuple(filter(None, given.split(","))) if isinstance(given, str) else given


def _counts(given: Any) -> Any:
    """Returns {"": 2} for 2, and {"qwen": 2, "smollm2": 1} for qwen=2,smollm2=1."""
    if isinstance(given, Mapping):
        return given
    said = (one.rpartition("=") for one in str(given).split(","))
    return {model: number for model, _, number in said}


def _some(counts: dict[str, int]) -> dict[str, int]:
    if wrong := [model for model, number in counts.items() if number < 1]:
        raise ValueError(" ".join(["must be at least 1", *filter(None, wrong)]))
    return counts


Count = Annotated[int, Field(ge=0)]
Counts = Annotated[dict[str, Count], NoDecode, BeforeValidator(_counts)]
Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]


class UpSettings(ClusterSettings):
    """Start a Tandem cluster on this machine: Redis, a gateway, prefill and decode workers, each a process."""

    name: CliPositionalArg[str] = Field(
        "",
        description="a Hugging Face folder, a GGUF file, smollm2, or a name on a hub: organisation/model[@revision]"
        "[:one of its GGUF files]; if not given, the demo model",
    )
    model: Listed = Field((), description="the same, once for each of several models: [name to serve it under=]NAME")
    model_path: Path = Field(DEMO_MODEL, description="the same for one model; NAME goes before it")
    model_name: str = Field("", description="name to serve it under; if not given, tandem-demo or the folder's name")
    prefill: Counts = Field({"": 1}, description="number of prefill workers of each model, or of one: smollm2=2")
    decode: Annotated[Counts, AfterValidator(_some)] = Field({"": 1}, description="number of decode workers, likewise")
    idle_stop: Listed = Field(
        (), description="a model that has workers only while it is asked for: NAME, or NAME=10m; docs/models.md"
    )
    awake_models: int | None = Field(None, ge=1, description="most of those that have workers at once")
    awake_memory: ByteSize | None = Field(
        None,
        description="most memory of all of those, weights and KV; if not given, what the others leave of the machine",
    )
    gateways: int = Field(1, ge=1, description="number of gateway processes, which share the ports")
    host: str = Field("127.0.0.1", description="address or name that the gateway listens on")
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
    store_url: str = Field("", description="keep responses in this Redis instead of in one started here")
    namespace: str = Field(
        "", description="prefix of the registry's keys; if not given, one of this cluster's own on a given Redis"
    )
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
    transports: str = Field("auto", description="how KV may move, best first; auto: shm, tcp, and what GPUs have")
    disaggregation: Literal["require", "prefer", "auto"] = Field(
        "auto", description="who prefills prompts: prefill workers, those if there are any, or what costs less"
    )
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "pythonic",
        "deepseek",
        "granite",
        "phi4_mini",
        "glm4",
        "harmony",
    ] = Field("auto", description="how the model writes calls of tools; auto: as its chat template shows")
    reasoning_parser: Literal["auto", "none", "think", "mistral", "harmony", "granite", "granite_3_2"] = Field(
        "auto", description="what the model writes around its thoughts; auto: as its chat template shows"
    )
    prefill_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each prefill worker; if not given, 256MiB, or 4MiB with the null engine"
    )
    decode_kv_memory: ByteSize | None = Field(
        None, description="KV cache of each decode worker; if not given, 512MiB, or 8MiB with the null engine"
    )
    prefill_tensor_parallel: int | None = Field(
        None, ge=1, le=8, description="processes that share each prefill worker's layers; if not given, 1"
    )
    decode_tensor_parallel: int | None = Field(
        None, ge=1, le=8, description="processes that share each decode worker's layers; if not given, 1"
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
    speculative_model: ModelPath | None = Field(
        None, description="folder of a draft model with the same vocabulary, or of heads"
    )
    lora_dir: Path | None = Field(None, description="folder that LoRA adapters (PEFT) are loaded from")
    lora_hub: bool | None = Field(None, description="LoRA adapters may be fetched from the Hugging Face Hub, too")
    threads: int | None = Field(None, ge=1, description="CPU threads per worker; if not given, cores / workers")
    drain_s: float = Field(30.0, ge=0, description="on SIGTERM, time for what a worker runs to end; then it moves")
    file: Path | None = Field(None, description="a cluster.yaml that says what runs, instead of options; docs/ray.md")
    ray: str = Field("", description="run on the Ray cluster at this address; auto: the one of this machine")
    ray_namespace: str = Field("tandem", min_length=1, description="Ray's name for this cluster's actors")
    detach: bool = Field(
        False, description="also -d: leave the cluster running; with --ray also: change the one that runs"
    )
    logs: Path = Field(LOGS, description="folder for the processes' logs")
    ready_timeout_s: float = Field(120.0, gt=0, description="how long the cluster may take to become ready")
    sample: str = Field("", description="a prompt to stream one answer for when ready")

    def cluster(self, environment: Mapping[str, str]) -> Cluster:
        """
        Args:
            environment: variables of services' settings, which override the choices made here.

        Raises:
            ValueError: the file, or an option beside it, is wrong.
        """
        if self.file is not None:
            if beside := sorted(self.model_fields_set - BESIDE_FILE):
                options = ", ".join(f"--{name.replace('_', '-')}" for name in beside)
                raise ValueError(f"{options}: --file says what runs; set it there")
            return read_cluster(self.file)
        gateway = {
            "host", "http_port", "grpc_port", "disaggregation", "api_keys", "insecure", "tool_parser",
            "reasoning_parser",
        }  # fmt: skip
        return Cluster.model_validate(
            {
                "models": [
                    {"id": id_, "name": name, "weights": {"path": path}} | self._idle(name)
                    for id_, name, path in self._models()
                ],
                "awake": {"models": self.awake_models, "memory": self.awake_memory},
                "workers": {"settings": self._worker_settings()},
                "pools": [
                    self._pool(role, id_, name, environment)
                    for id_, name, _ in self._models()
                    for role in ("prefill", "decode")
                ],
                "gateway": {
                    "replicas": self.gateways,
                    "settings": self.model_dump(include=gateway, exclude_none=True) | self._own_ports(),
                },
                "redis": {"url": self.redis_url, "port": self.redis_port, "namespace": self.namespace},
                "security": self.model_dump(include=set(ClusterSettings.model_fields), exclude_none=True),
            }
        )

    def found(self) -> Self:
        """Returns the options with folders and names of their models, fetched if they are on a hub.

        Raises:
            ValueError: there is no such model, or they do not fit.
        """
        if self.file is not None:
            return self
        if self.model and (self.name or self.model_name or "model_path" in self.model_fields_set):
            raise ValueError("--model: names all models; NAME, --model-path and --model-name are for one alone")
        if not self.model:
            found = find_model(self.name or str(self.model_path), lambda weights: self._misfit(self.needs(weights)))
            name = self.model_name or ("" if found.path == DEMO_MODEL else found.name)
            return self.model_copy(update={"model_path": as_folder(found.path), "model_name": name})
        before: list[MemoryNeed] = []
        named = [self._find(given, before) for given in self.model]
        return self.model_copy(update={"model": tuple(named)})

    def _find(self, given: str, before: list[MemoryNeed]) -> str:
        """Returns name=folder of one model, and adds its needs to `before`, those of the models before it."""
        name, named, model = given.partition("=")
        if not named or "/" in name:  # a folder
            name, model = "", given
        needs: list[MemoryNeed] = []

        def misfitting(weights: int) -> str:
            needs[:] = self.needs(weights, name or model)
            return self._misfit([*before, *needs])

        found = find_model(model, misfitting)
        if not self._idle(name or found.name):
            before += needs
        return f"{name or found.name}={as_folder(found.path)}"

    def _misfit(self, needs: list[MemoryNeed]) -> str:
        return misfit(needs, usable_memory())

    def needs(self, weights: int, model: str = "") -> list[MemoryNeed]:
        """Returns the memory that a model's workers need. `weights`: bytes in the checkpoint."""
        held = held_weights(weights, self.dtype, self.quantization)
        kv = {"prefill": self.prefill_kv_memory, "decode": self.decode_kv_memory}
        ranks = {"prefill": self.prefill_tensor_parallel, "decode": self.decode_tensor_parallel}
        needs = {
            role: MemoryNeed.of(held, int(kv[role] or KV_MEMORY[self.engine, role]), ranks[role] or 1) for role in kv
        }
        return [need for role, need in needs.items() for _ in range(self._count(role, model))]

    def _idle(self, model: str) -> dict[str, object]:
        """Returns the model's idle time in the form of a cluster.yaml."""
        said = dict(one.partition("=")[::2] for one in self.idle_stop)
        return {"idle": {"stop": said[model]} if said[model] else "stop"} if model in said else {}

    def _count(self, role: str, model: str) -> int:
        counts: dict[str, int] = getattr(self, role)
        return counts.get(model, counts.get("", 1))

    def _models(self) -> list[tuple[str, str, Path]]:
        """Returns id, name and folder of each model.

        Raises:
            ValueError: two models have one name, or workers are given for an unknown model.
        """
        if not self.model:
            self._check_idle([self.served_name])
            return [("model", self.served_name, self.model_path)]
        named = [given.partition("=") for given in self.model]
        names = [name for name, _, _ in named]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"--model: {', '.join(sorted(twice))} is there twice")
        self._check_idle(names)
        for option, counts in (("--prefill", self.prefill), ("--decode", self.decode)):
            if unknown := counts.keys() - {"", *names}:
                raise ValueError(f"{option}: {', '.join(sorted(unknown))} is no model; there is {', '.join(names)}")
        ids = [re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "model" for name in names]
        return [
            (id_ if ids.count(id_) == 1 else f"{id_}-{number}", name, Path(folder))
            for number, (id_, (name, _, folder)) in enumerate(zip(ids, named, strict=True))
        ]

    def _check_idle(self, names: list[str]) -> None:
        """Raises ValueError: an idle time is given for an unknown model."""
        if unknown := {one.partition("=")[0] for one in self.idle_stop} - {*names}:
            raise ValueError(f"--idle-stop: {', '.join(sorted(unknown))} is no model; there is {', '.join(names)}")

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
            "lora_hub",
            "max_num_seqs",
            "max_model_len",
            "threads",
            "drain_s",
        }
        lists_and_maps = {"transports": self.transports.split(","), "null_step": {"speedup": self.null_speedup}}
        return self.model_dump(include=fields, exclude_none=True) | lists_and_maps

    def _pool(self, role: str, model_id: str, model: str, environment: Mapping[str, str]) -> dict[str, object]:
        memory = self.prefill_kv_memory if role == "prefill" else self.decode_kv_memory
        ranks = self.prefill_tensor_parallel if role == "prefill" else self.decode_tensor_parallel
        settings: dict[str, object] = {"tensor_parallel": ranks} if ranks else {}
        if memory or "TANDEM_KV_MEMORY" not in environment:
            settings["kv_memory"] = int(memory or KV_MEMORY[self.engine, role])
        if role == "decode":
            speculative = {"speculative_method", "speculative_num_tokens", "speculative_model"}
            settings |= self.model_dump(include=speculative, exclude_none=True)
        name, replicas = f"{model_id}-{role}" if self.model else role, self._count(role, model)
        return {"name": name, "role": role, "model": model_id, "replicas": replicas, "settings": settings}
