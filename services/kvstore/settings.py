"""The kvstore's settings."""

from __future__ import annotations

import os

from pydantic import Field

from tandem.hosts import Host
from tandem.service_settings import ServiceSettings


def redis_url_of_environment() -> str:
    """REDIS_URL, the name that hosting platforms use."""
    return os.environ.get("REDIS_URL", "")


class KVStoreSettings(ServiceSettings):
    """Tandem's registry keeper: on the Redis at redis-url, or on one that it runs itself."""

    redis_url: str = Field(
        default_factory=redis_url_of_environment,
        description="the Redis to use; without one, a redis-server is started here",
    )
    redis_port: int = Field(
        6379, ge=0, le=65535, description="port of the redis-server started here; 0 takes a free one"
    )
    redis_host: Host = Field("127.0.0.1", description="address of the redis-server started here")
    redis_password: str = Field("", description="of the redis-server started here; needed where others can reach it")
    redis_memory_mb: int = Field(512, ge=16, description="memory bound of the redis-server started here")
    store_port: int | None = Field(
        None, ge=1, le=65535,
        description="port of a second redis-server, which evicts, for what clients want kept; none: no such server",
    )  # fmt: skip
    store_memory_mb: int = Field(256, ge=16, description="memory bound of the second redis-server")
    grpc_port: int = Field(50052, ge=0, le=65535, description="0 takes a free one")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of Prometheus metrics, at /metrics; 0 takes a free one; none if not set"
    )
    sweep_s: float = Field(1.0, gt=0, description="seconds between two sweeps of what is past its time")
