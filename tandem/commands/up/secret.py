"""The secret of a cluster that was given none: no other process of the machine passes for one of its own."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_urlsafe

from tandem.cluster import Cluster
from tandem.commands.clusters import SECRET_FILE


def with_secret(cluster: Cluster, folder: Path) -> Cluster:
    """The same, with a new secret in `folder`, unless it has one.

    In a namespace that was named, on a Redis that was given, there may be others of the cluster, who could not know it.
    """
    path = folder.absolute() / SECRET_FILE
    path.unlink(missing_ok=True)
    if cluster.security.get("cluster_secret") or (cluster.redis.url and cluster.redis.namespace):
        return cluster
    write_for_owner(path, token_urlsafe(32))
    return cluster.model_copy(update={"security": {**cluster.security, "cluster_secret": path}})


def write_for_owner(path: Path, text: str) -> None:
    """Write a new file that no other user may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
