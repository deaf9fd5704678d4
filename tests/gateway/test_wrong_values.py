"""A gateway goes on serving whatever one value in Redis becomes."""

from __future__ import annotations

import asyncio

import httpx
from redis.asyncio import Redis

from services.gateway import Gateway
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers
from tests.registry import wrong_values

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 5}
VALUES = (None, b"", b"\xff\xfe\x00\x80", b'{"another": ["shape"]}', b"-1", b"9" * 400)


async def test_a_gateway_outlives_any_wrong_value(gateway: Gateway, http: httpx.AsyncClient, peers: Peers) -> None:
    registry, settings = gateway.shared.view.registry, gateway.settings
    await wrong_values.fill_names(registry)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    async with Redis.from_url(settings.redis_url) as raw:
        for number, place in enumerate(await wrong_values.places(raw, settings.namespace)):
            await wrong_values.spoil(raw, place, VALUES[number % len(VALUES)])
            await eventually(lambda: gateway.shared.view.age < 0.1)
            ended = [task for task in gateway._tasks if task.done()]
            assert not ended, f"{place}: {ended}"
            assert await served(http), place


async def served(http: httpx.AsyncClient) -> bool:
    """True if a request is answered, at the latest when each worker has beaten again."""
    async with asyncio.timeout(30):
        while (answer := await http.post("/v1/completions", json=BODY)).status_code == 503:
            await asyncio.sleep(0.05)
    return answer.status_code == 200
