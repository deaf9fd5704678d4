"""Models that start on demand: the memory and time that each takes, and the launcher that starts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tandem.checkpoints import MemoryNeed, weights_bytes
from tandem.cluster import Cluster, Model
from tandem.commands.up.models import need_of
from tandem.commands.up.plan import ClusterPlan
from tandem.local import Launcher, OnDemand, OnDemandModel, WakeBudget, WakePlan
from tandem.machine.resources import usable_memory
from tandem.registry import Registry

# Estimate of a first start: a process with its libraries, and weights at the speed of an ordinary disk.
PROCESS_S, BYTES_PER_S = 8.0, 200e6
REGISTRY_WAIT_S = 2.0


@asynccontextmanager
async def on_demand(
    plan: ClusterPlan, launcher: Launcher, report: Callable[[str], None], start_bound_s: float, on_ray: bool
) -> AsyncIterator[OnDemand | None]:
    """Yields the models on demand while they run; None if all models are pinned."""
    cluster = plan.cluster
    if not cluster.on_demand:
        yield None
        return
    models = await asyncio.to_thread(lambda: [_on_demand_model(plan, model) for model in cluster.on_demand])
    wakes = WakePlan(models, await asyncio.to_thread(_room, cluster, on_ray), asyncio.get_running_loop().time())
    registry = Registry.connect(plan.redis_url, namespace=cluster.namespace, timeout=REGISTRY_WAIT_S)
    try:
        yield OnDemand(launcher, registry, wakes, report, start_bound_s)
    finally:
        await registry.close()


def _on_demand_model(plan: ClusterPlan, model: Model) -> OnDemandModel:
    assert model.idle is not None
    needs = _needs(plan.cluster, model)
    services = tuple(one for one in plan.sleeping if one.settings["model_name"] == model.name)
    start_s = PROCESS_S + sum(need.weights for need in needs) / BYTES_PER_S
    return OnDemandModel(model.name, services, model.idle.stop, sum(need.total for need in needs), start_s)


def _needs(cluster: Cluster, model: Model) -> list[MemoryNeed]:
    weights = _weights(cluster, model)
    pools = (pool for pool in cluster.pools if pool.model == model.id)
    return [need_of(pool.settings, weights) for pool in pools for _ in range(pool.replicas)]


def _weights(cluster: Cluster, model: Model) -> int:
    """Returns the bytes of a checkpoint; 0 for one that Ray brings in a zip."""
    if model.weights.kind != "runtime_env":
        return weights_bytes(str(model.weights.settled))
    folder = Path(cluster.ray.runtime_env["working_dir"]) / model.weights.path
    return weights_bytes(str(folder)) if folder.exists() else 0


def _room(cluster: Cluster, on_ray: bool) -> WakeBudget:
    """Returns the memory for models on demand: as configured, or what pinned models leave; on Ray all of it."""
    if cluster.awake.memory is not None or on_ray:
        return WakeBudget(cluster.awake.models, cluster.awake.memory)
    pinned = (model for model in cluster.models if not model.idle)
    taken = sum(need.total for model in pinned for need in _needs(cluster, model))
    return WakeBudget(cluster.awake.models, usable_memory() - taken)
