"""Settings that services share: the address of each, and the registry."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tandem.hosts import EVERYWHERE, Host
from tandem.security import ClusterSettings


class ServiceSettings(ClusterSettings):
    """Settings of every service. `grpc_port` has a default of its own in some."""

    redis_url: str = Field(
        "redis://127.0.0.1:6379", description="the registry; the kvstore starts a redis-server where it is given none"
    )
    namespace: str = Field("tandem", min_length=1, description="prefix of the registry's keys: one per cluster")
    host: Host = Field("127.0.0.1", description="address to listen on")
    grpc_port: int = Field(0, ge=0, le=65535, description="0 takes a free one (gateway: 50051, kvstore: 50052)")
    health_port: int | None = Field(
        None, ge=1, le=65535, description="port of plain gRPC health and draining, for probes; none if not set"
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="the least that is logged")


class RequestSettings(ServiceSettings):
    """Settings of the services that requests go through: gateways and workers."""

    advertise_host: Host = Field("", description="address that others reach it at (default: host)")
    drain_s: float = Field(30.0, ge=0, description="on SIGTERM, time for running requests to end; a worker's then move")
    followed: Path | None = Field(
        None, description="JSON file of settings that are followed while it runs (see docs/run-time.md)"
    )

    def reachable_host(self, hostname: str) -> str:
        """Returns the host by which others reach the service. `hostname`: the machine's."""
        return self.advertise_host or (hostname if self.host in EVERYWHERE else self.host)


class MetricsSettings(ServiceSettings):
    """Settings of the services that have a port for metrics: workers and the kvstore."""

    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of Prometheus metrics, at /metrics; 0 takes a free one; none if not set"
    )
