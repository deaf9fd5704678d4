"""`tandem render helm`: one cluster.yaml, which `tandem up` takes too, as values of the Helm chart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from tandem.cluster import Cluster, Model, Pool, read_cluster
from tandem.settings import Settings, load

# The chart itself sets where processes listen.
ADDRESSES = {"host", "advertise_host", "http_port", "grpc_port", "own_http_port"}


class RenderSettings(Settings):
    """Write a cluster.yaml as values of the Helm chart to the standard output."""

    file: Path = Field(Path("cluster.yaml"), description="the cluster, as for `tandem up --file`")


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["helm"]:
        asked = arguments[:1] in (["-h"], ["--help"])
        print("usage: tandem render helm [--file=cluster.yaml]", file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    settings = load(RenderSettings, arguments[1:], "tandem render helm")
    try:
        made = helm_values(read_cluster(settings.file))
    except ValueError as error:
        raise SystemExit(f"tandem render: {error}") from None
    print(yaml.safe_dump(made, sort_keys=False, default_flow_style=False), end="")


def helm_values(cluster: Cluster) -> dict[str, Any]:
    """Raises ValueError: a field, which is named, asks for what the chart does not have."""
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


def _check_movable(cluster: Cluster) -> None:
    """Refuse files of this machine, which containers do not have."""
    for what, settings in (("security", cluster.security), ("gateway.settings", cluster.gateway.settings)):
        for name in ("cluster_secret", "tls", "api_keys"):
            if settings.get(name):
                raise ValueError(f"{what}.{name}: is a file of this machine; the chart brings its own")
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
    """Returns a part's resources and settings, if any."""
    resources = {kind: amounts for kind, amounts in part.resources.model_dump().items() if amounts}
    settings = {name: value for name, value in part.settings.items() if name not in ADDRESSES}
    return {name: found for name, found in (("resources", resources), ("settings", settings)) if found}


def _on_gpu(pool: Pool) -> bool:
    return str(pool.settings.get("device", "cpu")).startswith("cuda")
