"""Refusals of a worker's registration, in words that say what to change."""

from __future__ import annotations

from tandem.registry.errors import IncompatibleLayout, WorkerIdTaken
from tandem.registry.worker import WorkerInfo


def id_taken(info: WorkerInfo, address: str, host: str, model: str, ends_in_ms: int) -> WorkerIdTaken:
    return WorkerIdTaken(
        f"worker_id: {info.worker_id} at {info.grpc_address} on host {info.host}, which serves model {info.model}, "
        f"cannot register: a live worker of that id is at {address} on host {host} and serves model {model}. "
        "Give this worker an id of its own, or its cluster a namespace of its own",
        ends_in_ms / 1000,
    )


def incompatible_layout(info: WorkerInfo, worker_id: str, layout_hash: str, role: str) -> IncompatibleLayout:
    return IncompatibleLayout(
        f"layout_hash: {info.layout_hash} is the KV layout of {info.role} worker {info.worker_id}, and of no live "
        f"{role} worker of model {info.model}, revision {info.revision}: that of {worker_id} is {layout_hash}. "
        "Layouts are equal where dtype, block size and tensor parallelism are"
    )
