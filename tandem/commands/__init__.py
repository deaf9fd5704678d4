"""One module per `tandem` command. The command line may enter."""

from contextlib import suppress
from pathlib import Path

LOGS = Path(".run/logs")
# Beside the logs: where the Redis that `tandem up` has started is found, with its password.
REDIS_URL_FILE = "redis-url"

# Where `tandem up` is found unless it was told other ports.
UP_ADDRESSES = {
    "redis_url": "redis://127.0.0.1:6380",
    "gateway_url": "http://127.0.0.1:8000",
    "grpc_address": "127.0.0.1:50051",
}


def with_own_password(redis_url: str) -> str:
    """The same, with the password where it is the Redis that `tandem up` has started from this folder."""
    with suppress(OSError):
        own = (LOGS / REDIS_URL_FILE).read_text(encoding="utf-8")
        if own.rpartition("@")[2] == redis_url.removeprefix("redis://"):
            return own
    return redis_url
