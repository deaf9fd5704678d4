"""The services that `tandem up` starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.cluster import Cluster, Service
from tandem.hosts import address, reached_from_here


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Services in starting order, and their addresses. `sleeping`: workers of models that start on demand."""

    cluster: Cluster
    redis_url: str
    kvstore: Service
    workers: list[Service]
    sleeping: list[Service]
    gateways: list[Service]
    hosts: Mapping[str, str] = field(default_factory=dict)  # hosts of gateways on other machines

    @classmethod
    def of(
        cls, cluster: Cluster, redis_url: str, kvstore: Service, folder: Path, environment: Mapping[str, str]
    ) -> ClusterPlan:
        """Returns the plan of a cluster. `environment`: variables for services' settings that have no option."""
        workers = [replace(one, environment=environment) for one in cluster.worker_services(redis_url, folder)]
        gateways = [replace(one, environment=environment) for one in cluster.gateway_services(redis_url)]
        on_demand = {model.name for model in cluster.on_demand}
        sleeping = [one for one in workers if one.settings["model_name"] in on_demand]
        pinned = [one for one in workers if one not in sleeping]
        return cls(cluster, redis_url, replace(kvstore, environment=environment), pinned, sleeping, gateways)

    def url(self, gateway: Service, port: str = "http_port") -> str:
        host = self.hosts.get(gateway.name) or str(gateway.settings.get("host", "127.0.0.1"))
        return address(reached_from_here(host), gateway.settings[port])
