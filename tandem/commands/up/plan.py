"""What `tandem up` starts."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.local import Service
from tandem.local.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started, in this order, and where it will answer."""

    cluster: Cluster
    redis_url: str
    kvstore: Service
    workers: list[Service]
    gateways: list[Service]

    def url(self, gateway: Service, port: str = "http_port") -> str:
        host = str(gateway.settings.get("host", "127.0.0.1"))
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{gateway.settings[port]}"
