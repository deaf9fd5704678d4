"""A cluster as one schema for every launcher: models, pools of workers, gateways, Redis.

    cluster.yaml ─┐
    options ──────┴─> Cluster ──> services, each with all its settings ──> Launcher

A file has the shape of the Helm chart's values, as far as they mean anything outside Kubernetes:

    models: [{id: demo, name: tandem-demo, weights: {path: models/demo/target}}]
    workers: {resources: {requests: {cpu: 1}}}
    pools:
      - {name: prefill, role: prefill, model: demo}
      - {name: decode, role: decode, model: demo, replicas: 2, settings: {kv_memory: 512MiB}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tandem.aliases import Alias
from tandem.checkpoints import HUB, WHEELS, is_name
from tandem.cluster.quantities import amount_of, seconds_of
from tandem.cluster.service import Service
from tandem.hosts import with_bare_hosts
from tandem.machine.resources import usable_cpus
from tandem.security import ClusterSettings
from tandem.settings import Settings

Name = Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
DEFAULT_NAMESPACE = "tandem"  # every service's default
RESERVED = ("gateway", "kvstore")
# The idle time after which such a model stops, unless the file sets another.
IDLE_S = 300.0


Seconds = Annotated[float, BeforeValidator(seconds_of), Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Resources(_Part):
    """A container's resources: quantities by name, as cpu, memory, nvidia.com/gpu. A request overrides a limit."""

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}

    def amounts(self) -> dict[str, float]:
        return {name: amount_of(name, value) for name, value in (self.limits | self.requests).items()}

    @model_validator(mode="after")
    def _readable(self) -> Resources:
        self.amounts()
        return self


class ModelWeights(_Part):
    """The place of a model's folder or GGUF file: `path`, on every machine or within Ray's working_dir; or `url`, the
    name by which every machine fetches it from a hub."""

    kind: Literal["baked", "runtime_env", "download"] = "baked"
    path: Path = Path()
    url: str = ""
    files: dict[str, str] = {}  # name: SHA-256 of downloaded files, which the chart checks (`tandem render helm`)

    @property
    def settled(self) -> Path | str:
        """Returns the model's path or name for services' settings. Ray starts each service in the working_dir."""
        if self.kind == "download":
            return self.url if self.url in WHEELS else HUB + self.url.removeprefix(HUB)
        return self.path.resolve() if self.kind == "baked" else self.path

    @model_validator(mode="after")
    def _named(self) -> ModelWeights:
        if self.kind != "download" and (self.url or self.path == Path()):
            raise ValueError(f"{self.kind}: a path is needed, and no url")
        if self.kind == "download" and (self.path != Path() or not is_name(self.url)):
            known = ", ".join(WHEELS)
            raise ValueError(f"download: url must be hf://organisation/model[@revision] or {known}, got {self.url!r}")
        return self


class Idle(_Part):
    """The on-demand mode of a model: its workers start at a request, and stop after some time without one."""

    stop: Seconds = IDLE_S


class AwakeLimits(_Part):
    """The most that workers of models with `idle` may take together, for weights and KV; None: what the machine has."""

    models: int | None = Field(default=None, ge=1)
    memory: ByteSize | None = Field(default=None, gt=0)


class Model(_Part):
    id: Name
    name: str = Field(min_length=1)
    weights: ModelWeights
    # None: its workers always run; "stop": they stop after IDLE_S.
    idle: Annotated[Idle | None, BeforeValidator(lambda said: {} if said == "stop" else said)] = None
    # Further names that it answers to, which other models may share: its weight under each name, or "fallback".
    aliases: dict[str, float | Literal["fallback"]] = {}


class Replicas(_Part):
    replicas: int = Field(default=1, ge=0)
    resources: Resources = Resources()
    settings: Annotated[dict[str, Any], AfterValidator(with_bare_hosts)] = {}


class Pool(Replicas):
    name: Name
    role: Literal["prefill", "decode"]
    model: Name

    @property
    def ranks(self) -> int:
        """Returns the number of processes of each of its workers."""
        return int(self.settings.get("tensor_parallel", 1))

    @property
    def text(self) -> str:
        return f"{self.replicas} {self.name}" + (f" (TP {self.ranks})" if self.ranks > 1 else "")


class Redis(_Part):
    """The Redis server at `url`, or one started at `port`. `namespace`: None: one of this cluster's own."""

    url: str = ""
    namespace: str = ""
    port: int = Field(default=6380, ge=1, le=65535)


class Ray(_Part):
    """Settings only of `tandem up --ray`. `runtime_env`: what Ray brings to each node (format: docs.ray.io)."""

    runtime_env: dict[str, Any] = {}


class Cluster(_Part):
    models: list[Model] = Field(min_length=1)
    awake: AwakeLimits = AwakeLimits()
    workers: Replicas = Replicas()
    pools: list[Pool] = Field(min_length=1)
    gateway: Replicas = Replicas()
    redis: Redis = Redis()
    ray: Ray = Ray()
    security: dict[str, Path] = {}  # settings of every service: cluster_secret, tls

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: Any) -> Any:
        """Fills in pools' missing fields from `workers`; maps are merged, as in the chart."""
        if isinstance(values, dict) and isinstance(values.get("pools"), list):
            defaults = values.get("workers") or {}
            pools = [_merged(defaults, pool) if isinstance(pool, dict) else pool for pool in values["pools"]]
            return values | {"pools": pools}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        check_settings([("security", self.security)], ClusterSettings)
        known = [model.id for model in self.models]
        for what, names in (("models", known), ("pools", [pool.name for pool in self.pools])):
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{what}: {', '.join(sorted(twice))} is there twice")
        for model in self.models:
            self._check_brought(model)
            if model.idle and [other.name for other in self.models].count(model.name) > 1:
                raise ValueError(f"models.{model.id}.idle: {model.name} is two models, which start and stop together")
        for name, targets in self.aliases.items():
            Alias(name, targets)
        for pool in self.pools:
            if pool.model not in known:
                raise ValueError(f"pools.{pool.name}.model: {pool.model!r} is not an id of models: {', '.join(known)}")
            if pool.name.startswith(RESERVED):
                raise ValueError(f"pools.{pool.name}.name: begins as one of {', '.join(RESERVED)}")
        served = {pool.model for pool in self.pools if pool.role == "decode"}
        if missing := [name for name in known if name not in served]:
            raise ValueError(f"pools: no decode pool has model {', '.join(missing)}")
        return self

    @property
    def aliases(self) -> dict[str, dict[str, float | Literal["fallback"]]]:
        """Returns the targets of each alias, collected from the models."""
        found: dict[str, dict[str, float | Literal["fallback"]]] = {}
        for model in self.models:
            for alias, weight in model.aliases.items():
                found.setdefault(alias, {})[model.name] = weight
        return found

    @property
    def http_port(self) -> int:
        return int(self.gateway.settings.get("http_port", 8000))

    @property
    def grpc_port(self) -> int:
        return int(self.gateway.settings.get("grpc_port", 50051))

    @property
    def guarded(self) -> bool:
        """True if any service requires a secret, a certificate or keys."""
        return bool(self.security.get("cluster_secret") or self.gateway.settings.get("api_keys"))

    @property
    def namespace(self) -> str:
        """Returns the namespace in a shared Redis: by this machine's name and a port that only this cluster has."""
        if self.redis.namespace or not self.redis.url:
            return self.redis.namespace or DEFAULT_NAMESPACE
        host = str(self.gateway.settings.get("host", "127.0.0.1"))
        return f"{DEFAULT_NAMESPACE}-{gethostname()}-{host}-{self.http_port}"

    def in_namespace(self, namespace: str) -> Cluster:
        return self.model_copy(update={"redis": self.redis.model_copy(update={"namespace": namespace})})

    def storing(self, store_url: str) -> Cluster:
        """Returns this cluster with gateways that keep responses at `store_url`."""
        gateway = self.gateway.model_copy(update={"settings": {**self.gateway.settings, "store_url": store_url}})
        return self.model_copy(update={"gateway": gateway})

    def worker_services(self, redis_url: str, folder: Path) -> list[Service]:
        """Returns the workers. The ranks of workers without a cpu resource have equal parts of the usable cores, and
        borrow others; a cpu resource is at least a core a rank. All of a machine's workers share `folder`."""
        num_ranks = sum(pool.replicas * pool.ranks for pool in self.pools)
        part = max(1, usable_cpus() // max(1, num_ranks))

        def worker(pool: Pool, name: str) -> Service:
            resources = pool.resources.amounts()
            cores: dict[str, object] = {"threads": part * pool.ranks, "shared_cores": folder / "cores"}
            if "cpu" in resources:
                if pool.ranks > 1:
                    resources["cpu"] = max(pool.ranks, resources["cpu"])
                cores = {"threads": max(1, int(resources["cpu"]))}
            own = {"crash_dir": folder / "crashes", "metrics_port": 0} | cores | pool.settings | {"worker_id": name}
            settings = self._of_model(pool.model) | self._shared(redis_url) | own
            return Service(name, f"services.{pool.role}", settings, int(str(settings["threads"])), resources)

        return [worker(pool, f"{pool.name}-{number}") for pool in self.pools for number in range(pool.replicas)]

    def gateway_services(self, redis_url: str) -> list[Service]:
        """Returns the gateways, each of all models. Their ports count up from the settings'; with an own_http_port only
        that one counts up, and the gateways share the others."""
        aliases: dict[str, object] = {"aliases": self.aliases} if self.aliases else {}
        return [
            Service(
                "gateway" if self.gateway.replicas == 1 else f"gateway-{number}",
                "services.gateway",
                self._shared(redis_url) | aliases | self.gateway.settings | self._gateway_ports(number),
                resources=self.gateway.resources.amounts(),
            )
            for number in range(self.gateway.replicas)
        ]

    def kvstore_service(self, **own_redis: object) -> Service:
        """Returns the kvstore. `own_redis`: settings of the servers that it starts."""
        redis: dict[str, object] = {"redis_url": self.redis.url} if self.redis.url else {"redis_port": self.redis.port}
        settings = {**redis, **own_redis, **self._own_namespace(), "grpc_port": 0, "metrics_port": 0, **self.security}
        return Service("kvstore", "services.kvstore", settings)

    @property
    def on_demand(self) -> list[Model]:
        """Returns the models that have workers only on demand."""
        return [model for model in self.models if model.idle]

    def expected(self, model: str) -> dict[str, int]:
        """Returns the worker counts that gateways report for a model once all its workers are ready."""
        ids = [known.id for known in self.models if known.name == model]
        of_role = {
            role: sum(pool.replicas for pool in self.pools if pool.role == role and pool.model in ids)
            for role in ("prefill", "decode")
        }
        pairs = of_role["prefill"] * of_role["decode"]
        return {"decode_workers": of_role["decode"], "linked_pairs": pairs}

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Returns the addresses that gateways and Redis will listen on here, by the setting that names each.

        Raises:
            ValueError: two services that do not share ports have the same address.
        """
        found = {"--redis-port": ("127.0.0.1", self.redis.port)} if not self.redis.url else {}
        for gateway in self.gateway_services(""):
            host, settings = str(gateway.settings.get("host", "127.0.0.1")), gateway.settings
            for name in ("http_port", "grpc_port", "own_http_port"):
                option = f"--{name.replace('_', '-')}"
                key = option + (f" of {gateway.name}" if gateway.name != "gateway" else "")
                if settings.get(name):
                    _add_address(found, option, key, (host, int(str(settings[name]))))
        return found

    def _check_brought(self, model: Model) -> None:
        weights, place = model.weights, f"models.{model.id}.weights"
        if weights.kind != "runtime_env":
            return
        if not isinstance(self.ray.runtime_env.get("working_dir"), str):
            raise ValueError(f"{place}.kind: runtime_env needs ray.runtime_env.working_dir, a folder or a zip's URI")
        if weights.path.is_absolute() or ".." in weights.path.parts:
            raise ValueError(f"{place}.path: {weights.path} is not within ray.runtime_env.working_dir")

    def _gateway_ports(self, number: int) -> dict[str, object]:
        first = self.gateway.settings.get("own_http_port")
        if first is None:
            return {"http_port": self.http_port + number, "grpc_port": self.grpc_port + number}
        return {"http_port": self.http_port, "grpc_port": self.grpc_port, "own_http_port": int(first) + number}

    def _of_model(self, model_id: str) -> dict[str, object]:
        model = next(model for model in self.models if model.id == model_id)
        return {"model_path": model.weights.settled, "model_name": model.name}

    def _shared(self, redis_url: str) -> dict[str, object]:
        return {"redis_url": redis_url, **self._own_namespace(), **self.security}

    def _own_namespace(self) -> dict[str, object]:
        return {} if self.namespace == DEFAULT_NAMESPACE else {"namespace": self.namespace}


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster file.

    Raises:
        ValueError: the file is malformed, or fields are wrong; one line for each, with its name.
    """
    try:
        return Cluster.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--file: {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in _problems(error))) from None


def check_settings(given: Sequence[tuple[str, Mapping[str, Any]]], settings: type[Settings]) -> None:
    """Checks given settings, by the name of their place, against a class of settings.

    Raises:
        ValueError: one line for each setting that the class does not have or allow, after the name of its place.
    """
    problems = []
    needed = {"model_path": "."} if "model_path" in settings.model_fields else {}
    for name, values in given:
        try:
            settings.model_validate({**needed, **values})
        except ValidationError as error:
            problems += [f"{name}.{line}" for line in _problems(error)]
    if problems:
        raise ValueError("\n".join(problems))


def _add_address(found: dict[str, tuple[str, int]], option: str, key: str, place: tuple[str, int]) -> None:
    """Adds an address. The same option may name it twice, as gateways may share a port."""
    other = next((name for name, taken in found.items() if taken[1] == place[1]), "")
    if other and other.partition(" of ")[0] != option:
        raise ValueError(f"{key}: {place[1]} is {other}, too")
    if not other:
        found[key] = place


def _problems(error: ValidationError) -> list[str]:
    places = [".".join(map(str, problem["loc"])) for problem in error.errors()]
    words = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
    return [f"{place}: {text}" if place else text for place, text in zip(places, words, strict=True)]


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(under[key], value) for key, value in over.items() if _are_maps(under.get(key), value)}
    return under | over | both


def _are_maps(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)
