"""Authentication: of a cluster's processes by its secret and TLS, of clients by API keys. Anyone may enter."""

from tandem.security.api_keys import (
    DEFAULT_TIER,
    ApiKey,
    Keys,
    Tier,
    check_exposed,
    digest,
    parse_keys,
    read_keys,
    text_of,
    write_keys,
)  # fmt: skip
from tandem.security.cluster_secret import NAME, NO_SECRET, OPEN, TLS, ClusterSecret, ClusterSettings, Security

__all__ = [
    "DEFAULT_TIER", "NAME", "NO_SECRET", "OPEN", "TLS", "ApiKey", "ClusterSecret", "ClusterSettings", "Keys",
    "Security", "Tier", "check_exposed", "digest", "parse_keys", "read_keys", "text_of", "write_keys",
]  # fmt: skip
