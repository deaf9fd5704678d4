"""The description of a cluster by a file or options, and the services that it makes. Launchers and commands may enter.

`Service` can be imported without the schema and YAML, by code that only runs services.
"""

from typing import TYPE_CHECKING

from tandem.cluster.service import Service
from tandem.lazy import lazily

if TYPE_CHECKING:
    from tandem.cluster.cluster import (
        DEFAULT_NAMESPACE,
        Cluster,
        Model,
        ModelWeights,
        Pool,
        check_settings,
        read_cluster,
    )

__all__ = [
    "DEFAULT_NAMESPACE",
    "Cluster",
    "Model",
    "ModelWeights",
    "Pool",
    "Service",
    "check_settings",
    "read_cluster",
]
_WITH_YAML = {
    "cluster": (
        "DEFAULT_NAMESPACE", "Cluster", "Model", "ModelWeights", "Pool", "check_settings", "read_cluster",
    ),
}  # fmt: skip
__getattr__ = lazily(__name__, _WITH_YAML)
