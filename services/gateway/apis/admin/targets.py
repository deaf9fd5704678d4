"""The scrape targets of a cluster, as the registry knows it, for Prometheus' http_sd_configs."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import Unavailable
from tandem.registry import ClusterView, RegistryUnavailable


async def scrape_targets(view: ClusterView) -> list[dict[str, Any]]:
    """Returns the targets: gateways, workers and the kvstore, of all models.

    Raises:
        Unavailable: Redis is gone; Prometheus then keeps the targets that it knows.
    """
    try:
        gateways, keeper = await view.registry.gateways.measured()
    except RegistryUnavailable as error:
        raise Unavailable(f"registry unavailable: {error}", code="registry_unavailable") from None
    found = [_target(gateway.own_http or gateway.http, "gateway") for gateway in gateways]
    for worker in view.workers:
        if worker.info.metrics_address:
            found.append(_target(worker.info.metrics_address, worker.info.role, worker=worker.info.worker_id))
    return [*found, _target(keeper, "kvstore")] if keeper else found


def _target(address: str, component: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": {"component": component, **labels}}
