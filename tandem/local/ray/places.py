"""Placement of actors: what each needs of a node, and which two share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from tandem.local.launcher import Service
from tandem.local.ray.actor import ROLES

RESOURCES = {"cpu": "CPU", "nvidia.com/gpu": "GPU", "memory": "memory"}
# Transports that reach no other machine.
ONE_MACHINE = {"shm", "cuda_ipc"}


def places(services: Sequence[Service]) -> list[tuple[Service, ...]]:
    """Who shares a machine: a prefill and a decode worker of one model whose KV stays on one; others are alone."""
    pairs: list[tuple[Service, ...]] = []
    close = [service for service in services if _stays(service)]
    for model in {service.settings["model_name"] for service in close}:
        by_role = [[s for s in close if s.module == role and s.settings["model_name"] == model] for role in ROLES]
        pairs += zip(*by_role, strict=False)
    paired = {service.name for pair in pairs for service in pair}
    return [*pairs, *((service,) for service in services if service.name not in paired)]


def shortage(resources: Mapping[str, float]) -> str:
    """Resources among these that the cluster does not have, or not free."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    short = [
        f"{name}: {amount:g} needed, {free.get(name, 0):g} free of {total.get(name, 0):g}"
        for name, amount in ray_names(resources).items()
        if amount > free.get(name, 0)
    ]
    return "; ".join(short) or "it is starting, or no single node has all that it needs"


def _stays(service: Service) -> bool:
    transports = service.settings.get("transports", ())
    named = transports.split(",") if isinstance(transports, str) else transports
    return service.module in ROLES and isinstance(named, list | tuple) and len(named) > 0 and set(named) <= ONE_MACHINE


def ray_names(resources: Mapping[str, float]) -> dict[str, float]:
    return {RESOURCES.get(name, name): amount for name, amount in resources.items()}
