"""A cluster too small for what is asked of it: order is decided at the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster import RunningCluster, running_cluster

pytestmark = pytest.mark.alone

FLOOD = 30


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Its decode worker has blocks for about four answers of the flood."""
    with running_cluster(tmp_path_factory.mktemp("small"), "--decode-kv-memory=4MiB") as cluster:
        yield cluster


@pytest.fixture
async def client(small: RunningCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{small.http}/v1", api_key="none", max_retries=0, timeout=100) as client:
        yield client


async def generate(client: AsyncOpenAI, tenant: str, tier: str, max_tokens: int, began: Callable[[], object]) -> None:
    options: Any = {"service_tier": tier, "ignore_eos": True}
    parts = await client.completions.create(
        model="tandem-demo", prompt=f"def of_{tenant}(", max_tokens=max_tokens, stream=True, extra_body=options,
        extra_headers={"x-llm-d-inference-fairness-id": tenant},
    )  # fmt: skip
    began()
    async for _ in parts:
        continue


async def test_a_flood_of_batch_does_not_hold_up_realtime(
    small: RunningCluster, client: AsyncOpenAI, at_baseline: Callable[[RunningCluster], Awaitable[bool]]
) -> None:
    began: list[str] = []
    flood = [
        asyncio.create_task(generate(client, "flood", "flex", 200, lambda: began.append("flood"))) for _ in range(FLOOD)
    ]
    # One HTTP client for all questions: making one takes long enough to hold the flood up.
    async with asyncio.timeout(60), httpx.AsyncClient() as http:
        while await queued(small, http) < FLOOD / 2:
            await asyncio.sleep(0.01)
    await generate(client, "urgent", "priority", 10, lambda: began.append("urgent"))
    # How many make room while it is on its way depends on this machine; tests/gateway/test_priority.py has the order.
    assert len(began) < FLOOD, "it has been answered, and others that came before it wait"
    await asyncio.gather(*flood)
    assert len(began) == FLOOD + 1
    async with asyncio.timeout(60):
        while not await at_baseline(small):
            await asyncio.sleep(0.05)


async def queued(cluster: RunningCluster, http: httpx.AsyncClient) -> float:
    lines = (await http.get(f"{cluster.http}/metrics")).text.splitlines()
    (line,) = (line for line in lines if line.startswith("tandem_num_requests_queued") and '"batch"' in line)
    return float(line.rpartition(" ")[2])
