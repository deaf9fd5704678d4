"""Makes a secret for a cluster without one, so that other processes of the machine cannot join it."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_urlsafe

from tandem.cluster import Cluster
from tandem.commands.clusters import SECRET_FILE


def with_secret(cluster: Cluster, folder: Path) -> Cluster:
    """Returns the cluster, with a new secret in `folder` unless it has one.

    None is made if others of the cluster may be in the same namespace of the same Redis.
    """
    path = folder.absolute() / SECRET_FILE
    path.unlink(missing_ok=True)
    if cluster.security.get("cluster_secret") or (cluster.redis.url and cluster.redis.namespace):
        return cluster
    write_for_owner(path, token_urlsafe(32))
    return cluster.model_copy(update={"security": {**cluster.security, "cluster_secret": path}})


def write_for_owner(path: Path, text: str) -> None:
    """Write a new file that only its owner may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
