"""`tandem render`: one cluster.yaml as values of the Helm chart, or as a compose file of the same images.

cluster.yaml ──> tandem up [--ray]     processes, actors
             ──> render helm           values for `helm install`
             ──> render compose        a file for `docker compose up`, with REDIS_PASSWORD in its environment
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from tandem import __version__
from tandem.cluster import Cluster, Model, Pool, read_cluster
from tandem.settings import Settings, load

IMAGES = "ghcr.io/tandem-llm"
REDIS_PORT, STORE_PORT = 6379, 6378
# The chart and compose say themselves where a process listens.
ADDRESSES = {"host", "advertise_host", "http_port", "grpc_port", "own_http_port"}
GPU = "nvidia.com/gpu"


class RenderSettings(Settings):
    """Write a cluster.yaml as values of the Helm chart, or as a compose file, to the standard output."""

    file: Path = Field(Path("cluster.yaml"), description="the cluster, as for `tandem up --file`")


def main(arguments: list[str]) -> None:
    kinds = {"helm": helm_values, "compose": compose_file}
    if not arguments or arguments[0] not in kinds:
        asked = arguments[:1] in (["-h"], ["--help"])
        print("usage: tandem render helm|compose [--file=cluster.yaml]", file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    settings = load(RenderSettings, arguments[1:], f"tandem render {arguments[0]}")
    try:
        made = kinds[arguments[0]](read_cluster(settings.file))
    except ValueError as error:
        raise SystemExit(f"tandem render: {error}") from None
    print(yaml.safe_dump(made, sort_keys=False, default_flow_style=False), end="")


def helm_values(cluster: Cluster) -> dict[str, Any]:
    """
    Raises:
        ValueError: the chart does not have what a field says; names it.
    """
    _check_movable(cluster)
    values: dict[str, Any] = {
        "models": [
            {"id": one.id, "name": one.name, "weights": _chart_weights(one)}
            | ({"aliases": dict(one.aliases)} if one.aliases else {})
            for one in cluster.models
        ],
        "gateway": {"replicas": cluster.gateway.replicas} | _container(cluster.gateway),
        "pools": [
            {"name": pool.name, "role": pool.role, "model": pool.model, "replicas": pool.replicas,
             "accelerator": "cuda" if _on_gpu(pool) else "cpu"} | _container(pool)
            for pool in cluster.pools
        ],
        "apiKeys": {"required": bool(cluster.gateway.settings.get("api_keys"))},
    }  # fmt: skip
    if cluster.redis.url:
        values["redis"] = {"url": cluster.redis.url}
    return values


def compose_file(cluster: Cluster) -> dict[str, Any]:
    """
    Raises:
        ValueError: containers cannot have what a field says; names it.
    """
    _check_movable(cluster)
    own = "redis://:${REDIS_PASSWORD:?a password for Redis}@kvstore:%d"
    shared = {"redis_url": cluster.redis.url or own % REDIS_PORT}
    if cluster.redis.url:
        shared["namespace"] = cluster.namespace
    services = {"kvstore": _kvstore(cluster, shared)}
    for pool in cluster.pools:
        services[pool.name] = _workers(cluster, pool, shared)
    stored = shared if cluster.redis.url else {**shared, "store_url": own % STORE_PORT}
    for gateway in cluster.gateway_services(""):
        services[gateway.name] = _gateway(gateway.settings, stored)
    return {"services": services}


def _check_movable(cluster: Cluster) -> None:
    """Files of this machine are not in containers."""
    for what, settings in (("security", cluster.security), ("gateway.settings", cluster.gateway.settings)):
        for name in ("cluster_secret", "tls_cert", "tls_key", "tls_ca", "api_keys"):
            if settings.get(name):
                raise ValueError(f"{what}.{name}: is a file of this machine; the chart and compose bring their own")
    for model in cluster.models:
        if model.idle:
            raise ValueError(f"models.{model.id}.idle: only `tandem up` starts models when they are asked for")
        if model.weights.kind == "runtime_env":
            raise ValueError(f"models.{model.id}.weights.kind: runtime_env is what Ray alone brings")


def _chart_weights(model: Model) -> dict[str, Any]:
    weights = model.weights
    if weights.kind == "download":
        if not weights.files:
            fetch = f"`tandem fetch {weights.settled} FOLDER` prints them"
            raise ValueError(f"models.{model.id}.weights.files: the chart checks what it downloads: {fetch}")
        return {"kind": "download", "url": str(weights.settled), "files": dict(weights.files)}
    if weights.path.is_absolute():
        return {"kind": "hostPath", "hostPath": str(weights.path), "path": ""}
    return {"kind": "baked", "path": str(weights.path)}


def _container(part: Any) -> dict[str, Any]:
    """Resources and settings, where there are any."""
    resources = {kind: amounts for kind, amounts in part.resources.model_dump().items() if amounts}
    settings = {name: value for name, value in part.settings.items() if name not in ADDRESSES}
    return {name: found for name, found in (("resources", resources), ("settings", settings)) if found}


def _kvstore(cluster: Cluster, shared: Mapping[str, str]) -> dict[str, Any]:
    own: dict[str, object] = {
        "redis_port": REDIS_PORT, "redis_host": "0.0.0.0", "store_port": STORE_PORT,
        "redis_password": "${REDIS_PASSWORD:?a password for Redis}",
    }  # fmt: skip
    return _service("kvstore", {"host": "0.0.0.0"} | (dict(shared) if cluster.redis.url else own))


def _workers(cluster: Cluster, pool: Pool, shared: Mapping[str, str]) -> dict[str, Any]:
    """Containers of a pool are known by their own names, which their network resolves."""
    model = next(model for model in cluster.models if model.id == pool.model)
    settings: dict[str, Any] = {**shared, "model_name": model.name, **pool.settings, "host": "0.0.0.0"}
    mounts: dict[str, Any] = {}
    if model.weights.kind == "baked":
        settings["model_path"] = f"/models/{model.id}"
        mounts = {"volumes": [f"{model.weights.path.resolve()}:/models/{model.id}:ro"]}
    else:
        settings["model_path"] = str(model.weights.settled)
    image = f"{pool.role}-cuda" if _on_gpu(pool) else pool.role
    return _service(image, settings) | mounts | {"deploy": {"replicas": pool.replicas} | _limits(pool)}


def _gateway(settings: Mapping[str, object], shared: Mapping[str, str]) -> dict[str, Any]:
    """Only this machine reaches it: whoever opens it to others gives it keys."""
    given = {name: value for name, value in settings.items() if name not in (*ADDRESSES, "redis_url", "namespace")}
    inside = {"host": "0.0.0.0", "http_port": 8000, "grpc_port": 50051, "insecure": True}
    ports = [f"127.0.0.1:{settings[name]}:{inside[name]}" for name in ("http_port", "grpc_port")]
    return _service("gateway", {**shared, **given, **inside}) | {"ports": ports}


def _service(image: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    environment = {f"TANDEM_{name.upper()}": _text(value) for name, value in settings.items()}
    return {"image": f"{IMAGES}/{image}:{__version__}", "restart": "unless-stopped", "environment": environment}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _limits(pool: Pool) -> dict[str, Any]:
    """As `deploy.resources` of compose."""
    amounts = pool.resources.amounts()
    limits = {"cpus": f"{amounts['cpu']:g}"} if "cpu" in amounts else {}
    if "memory" in amounts:
        limits["memory"] = f"{int(amounts['memory'])}b"
    made: dict[str, Any] = {"limits": limits} if limits else {}
    if gpus := int(amounts.get(GPU, 0)):
        devices = [{"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}]
        made["reservations"] = {"devices": devices}
    return {"resources": made} if made else {}


def _on_gpu(pool: Pool) -> bool:
    return str(pool.settings.get("device", "cpu")).startswith("cuda")
