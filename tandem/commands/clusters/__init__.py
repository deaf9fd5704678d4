"""Running clusters, here or on Ray: their gateways, passwords and secrets. Commands and tests may enter."""

from pathlib import Path

LOGS = Path(".run/logs")
# A file beside the logs: the URL, with password, of the Redis that `tandem up` started.
REDIS_URL_FILE = "redis-url"
# A file beside it: the secret that `tandem up` made.
SECRET_FILE = "cluster-secret"

# The default addresses of `tandem up`.
UP_ADDRESSES = {
    "redis_url": "redis://127.0.0.1:6380",
    "gateway_url": "http://127.0.0.1:8000",
    "grpc_address": "127.0.0.1:50051",
}
