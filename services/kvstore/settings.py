"""The kvstore's settings."""

from __future__ import annotations

import os

from pydantic import Field

from tandem.service_settings import MetricsSettings


def redis_url_of_environment() -> str:
    """REDIS_URL, the name that hosting platforms use."""
    return os.environ.get("REDIS_URL", "")


class KVStoreSettings(MetricsSettings):
    """Tandem's registry keeper: on the Redis at redis-url, or on one that it runs itself."""

    redis_url: str = Field(
        default_factory=redis_url_of_environment,
        description="the Redis to use; without one, a redis-server is started here",
    )
    redis_port: int = Field(
        6379, ge=0, le=65535, description="port, at `host`, of the redis-server started here; 0 takes a free one"
    )
    redis_password: str = Field("", description="of the redis-server started here; needed where others can reach it")
    store_port: int | None = Field(
        None, ge=1, le=65535,
        description="port of a second redis-server, which evicts, for what clients want kept; none: no such server",
    )  # fmt: skip
    grpc_port: int = Field(50052, ge=0, le=65535, description="0 takes a free one")
