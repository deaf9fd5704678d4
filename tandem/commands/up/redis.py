"""The Redis of `tandem up` on this machine: given, or started here, with a password if the cluster is guarded."""

from __future__ import annotations

from pathlib import Path
from secrets import token_urlsafe

from tandem.cluster import Cluster, Service
from tandem.commands.clusters import REDIS_URL_FILE
from tandem.commands.up.secret import write_for_owner
from tandem.local import free_ports


def redis_of(cluster: Cluster, folder: Path, store_url: str) -> tuple[str, str, Service]:
    """Returns the URL of the registry, that of the store for kept responses, and the kvstore service for both."""
    (folder / REDIS_URL_FILE).unlink(missing_ok=True)
    given = store_of(cluster, store_url)
    port = None if given else free_ports(1)[0]
    password = token_urlsafe(24) if cluster.guarded else ""
    own: dict[str, object] = {} if given else {"store_port": port}
    if password and not (cluster.redis.url and given):
        own["redis_password"] = password
    login = f":{password}@" if password else ""
    url = cluster.redis.url or f"redis://{login}127.0.0.1:{cluster.redis.port}"
    if password and not cluster.redis.url:
        write_for_owner(folder / REDIS_URL_FILE, url)
    return url, given or f"redis://{login}127.0.0.1:{port}", cluster.kvstore_service(**own)


def store_of(cluster: Cluster, store_url: str) -> str:
    """Returns the store's URL of the command or the file; "" if neither has one."""
    return store_url or str(cluster.gateway.settings.get("store_url", ""))
