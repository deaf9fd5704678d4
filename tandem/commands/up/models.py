"""Fetches the models that a cluster.yaml names: here before anything starts, on Ray by each node."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from tandem.checkpoints import (
    HUB,
    WHEELS,
    MemoryNeed,
    as_folder,
    find_model,
    held_weights,
    misfit,
    wanted_files,
)
from tandem.cluster import Cluster, Model, ModelWeights
from tandem.commands.up_options import KV_MEMORY
from tandem.machine.resources import usable_memory

DEFAULT_KV = KV_MEMORY["model", "prefill"]  # a worker's default


def fetched(cluster: Cluster) -> Cluster:
    """Returns the cluster with each model's local folder; for a GGUF file the folder made of it.

    Raises:
        ValueError: there is no such model, or its workers do not fit into this machine's memory.
    """
    return cluster.model_copy(update={"models": [_here(cluster, model) for model in cluster.models]})


def check_name(weights: ModelWeights) -> None:
    """Check at the hub that the nodes can fetch the model.

    Raises:
        ValueError: there is no such model, or it cannot be served.
    """
    if weights.url not in WHEELS:
        wanted_files(weights.url.removeprefix(HUB))


def _here(cluster: Cluster, model: Model) -> Model:
    weights = model.weights
    if weights.kind == "download":
        path = find_model(weights.url, partial(_misfit, cluster, model.id)).path
    elif weights.kind == "baked":
        path = weights.path
    else:
        return model
    return model.model_copy(update={"weights": ModelWeights(path=as_folder(Path(path)))})


def _misfit(cluster: Cluster, model_id: str, weights: int) -> str:
    needs: list[MemoryNeed] = []
    for pool in cluster.pools:
        if pool.model == model_id:
            needs += [need_of(pool.settings, weights)] * pool.replicas
    return misfit(needs, usable_memory())


def need_of(settings: dict[str, Any], weights: int) -> MemoryNeed:
    """Returns the memory of one worker with these settings. `weights`: bytes in the checkpoint."""
    if settings.get("engine") == "null":
        weights = 0
    held = held_weights(weights, str(settings.get("dtype", "auto")), str(settings.get("quantization", "none")))
    kv = int(TypeAdapter(ByteSize).validate_python(settings.get("kv_memory") or DEFAULT_KV))
    return MemoryNeed.of(held, kv, int(settings.get("tensor_parallel", 1)))
