"""The gateways of a running cluster, as its registry names them, and the HTTP client for asking them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import httpx

from tandem.commands.clusters.own_cluster import with_own_password
from tandem.registry import Registry, RegistryUnavailable


def http_client(timeout_s: float, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Returns a client that reaches a cluster directly, ignoring proxies in the environment.

    Trusted certificates still come from the environment (SSL_CERT_FILE).
    """
    return httpx.AsyncClient(timeout=timeout_s, headers=headers, verify=httpx.create_ssl_context(), trust_env=False)


async def addresses(redis_url: str, namespace: str) -> list[str]:
    """Returns each gateway's own HTTP address; none without a registry."""
    with suppress(RegistryUnavailable, ValueError):
        registry = Registry.connect(with_own_password(redis_url), namespace=namespace)
        try:
            return [f"http://{one.own_http or one.http}" for one in await registry.gateways.live()]
        finally:
            await registry.close()
    return []


def said_by(answer: httpx.Response) -> str:
    """Returns an error's message."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code)
