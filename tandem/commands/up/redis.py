"""The Redis of `tandem up` on this machine: given, or started here, with a password where strangers are kept out."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_urlsafe

from tandem.cluster import Cluster
from tandem.commands import REDIS_URL_FILE
from tandem.local import Service


def redis_of(cluster: Cluster, folder: Path) -> tuple[str, Service]:
    """Its URL, and the kvstore that keeps it."""
    (folder / REDIS_URL_FILE).unlink(missing_ok=True)
    if cluster.redis.url:
        return cluster.redis.url, cluster.kvstore_service()
    place = f"127.0.0.1:{cluster.redis.port}"
    if not cluster.guarded:
        return f"redis://{place}", cluster.kvstore_service()
    password = token_urlsafe(24)
    url = f"redis://:{password}@{place}"
    _write_for_owner(folder / REDIS_URL_FILE, url)
    return url, cluster.kvstore_service(redis_password=password)


def _write_for_owner(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
