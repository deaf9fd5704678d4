"""Clusters that run, here or on Ray: their gateways, and what opens their doors. Commands and tests may enter."""

from pathlib import Path

LOGS = Path(".run/logs")
# Beside the logs: where the Redis that `tandem up` has started is found, with its password.
REDIS_URL_FILE = "redis-url"
# There, too: the secret of a cluster that was given none.
SECRET_FILE = "cluster-secret"

# Where `tandem up` is found unless it was told other ports.
UP_ADDRESSES = {
    "redis_url": "redis://127.0.0.1:6380",
    "gateway_url": "http://127.0.0.1:8000",
    "grpc_address": "127.0.0.1:50051",
}
