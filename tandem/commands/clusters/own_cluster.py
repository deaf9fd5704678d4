"""The password and secret of a cluster that `tandem up` runs here, for commands without them.

beside its logs, for their owner alone   redis-url, where Redis has a password; cluster-secret, where none was given
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tandem.commands.clusters import LOGS, REDIS_URL_FILE, SECRET_FILE
from tandem.commands.clusters.running import running
from tandem.registry import RedisAddress
from tandem.security import ClusterSettings

S = TypeVar("S", bound=ClusterSettings)


def with_own_password(redis_url: str) -> str:
    """Returns the URL, with the password if it is the Redis that `tandem up` started from this folder."""
    with suppress(OSError):
        own = (LOGS / REDIS_URL_FILE).read_text(encoding="utf-8")
        if own.rpartition("@")[2] == redis_url.removeprefix("redis://"):
            return own
    return redis_url


def with_own_secret(settings: S, redis_url: str, namespace: str) -> S:
    """Returns the settings, with the secret that `tandem up` made for the cluster of this registry."""
    if settings.cluster_secret is not None:
        return settings
    found = next(filter(_can_read, _secrets_of(redis_url, namespace)), None)
    return settings.model_copy(update={"cluster_secret": found}) if found else settings


def registry_name(redis_url: str, namespace: str) -> str:
    """Returns the name of a registry in a running cluster's note; "" for a malformed URL."""
    try:
        return f"{RedisAddress.parse(redis_url)} {namespace}"
    except ValueError:
        return ""


def _can_read(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def _secrets_of(redis_url: str, namespace: str) -> Iterator[Path]:
    """Yields files of secrets: of running clusters, then of the one started from this folder."""
    wanted = registry_name(redis_url, namespace)
    yield from (Path(note.logs) / SECRET_FILE for note in running() if wanted and note.registry == wanted)
    yield LOGS / SECRET_FILE
