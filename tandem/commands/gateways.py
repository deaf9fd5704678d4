"""The gateways of a running cluster, as its registry names them."""

from __future__ import annotations

from contextlib import suppress

import httpx

from tandem.commands import with_own_password
from tandem.registry import Registry, RegistryUnavailable


async def addresses(redis_url: str, namespace: str) -> list[str]:
    """Each gateway's own HTTP door; none without a registry."""
    with suppress(RegistryUnavailable, ValueError):
        registry = Registry.connect(with_own_password(redis_url), namespace=namespace)
        try:
            return [f"http://{one.own_http or one.http}" for one in await registry.gateways()]
        finally:
            await registry.close()
    return []


def said_by(answer: httpx.Response) -> str:
    """An error's words."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code)
