"""Placement of actors: the resources that each needs, the pairs that share a node, and the node of each.

a worker     on the node with the fewest of its role and model, then the fewest of all; without room it waits
a gateway    likewise, if other machines reach it; the first, and the kvstore, on the node that starts them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray

from tandem.cluster import Service
from tandem.hosts import EVERYWHERE
from tandem.local.ray.actor import ROLES

RESOURCES = {"cpu": "CPU", "nvidia.com/gpu": "GPU", "memory": "memory"}
# Transports that do not reach other machines.
ONE_MACHINE = {"shm", "cuda_ipc"}


def places(services: Sequence[Service]) -> list[tuple[Service, ...]]:
    """Returns the groups that share a node: a prefill and a decode worker of a model whose KV stays on one machine.

    All other services are alone.
    """
    pairs: list[tuple[Service, ...]] = []
    close = [service for service in services if _stays(service)]
    for model in {service.settings["model_name"] for service in close}:
        by_role = [[s for s in close if s.module == role and s.settings["model_name"] == model] for role in ROLES]
        pairs += zip(*by_role, strict=False)
    paired = {service.name for pair in pairs for service in pair}
    return [*pairs, *((service,) for service in services if service.name not in paired)]


@dataclass(frozen=True, slots=True)
class Placed:
    """The part of a node that a service takes."""

    node: str
    kind: tuple[str, str]  # module and model
    resources: Mapping[str, float]

    @classmethod
    def by(cls, service: Service, node: str) -> Placed:
        return cls(node, (service.module, str(service.settings.get("model_name", ""))), service.resources)


def node_for(place: Sequence[Service], nodes: Mapping[str, Mapping[str, float]], taken: Iterable[Placed]) -> str:
    """Returns the node with room that has the fewest of the same kind, then the fewest of all.

    `nodes`: their resources.

    "" if no node has room: then Ray places the service once it can.
    """
    taken = tuple(taken)
    room = {node: Counter(total) for node, total in nodes.items()}
    for one in taken:
        room.get(one.node, Counter()).subtract(ray_names(one.resources))
    needed: Counter[str] = Counter()
    for service in place:
        needed.update(ray_names(service.resources))
    kinds = {Placed.by(service, "").kind for service in place}

    def crowd(node: str) -> tuple[int, int]:
        here = Counter(one.kind for one in taken if one.node == node)
        return max(here[kind] for kind in kinds), here.total()

    usable = [node for node, free in room.items() if all(free[name] >= amount for name, amount in needed.items())]
    return min(usable, key=crowd, default="")


def stays_with_starter(service: Service) -> bool:
    """True for services on the starter's node: the kvstore, the first gateway, and gateways that listen locally."""
    if service.module in ROLES:
        return False
    reachable = service.settings.get("host") in EVERYWHERE
    return service.module != "services.gateway" or not reachable or service.name in ("gateway", "gateway-0")


def shortage(resources: Mapping[str, float]) -> str:
    """Describes the resources among these that the cluster lacks, or that are not free."""
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
