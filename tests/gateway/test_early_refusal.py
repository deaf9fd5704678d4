"""A gateway that is full: what would come too late is refused before its prompt is read, at both doors."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.full_queue import SMALL, full
from tests.gateway.peers import MODEL

# Its prompt alone would be refused as one that no model takes, were it read.
BODY = {"model": MODEL, "prompt": [10**6] * 40, "max_tokens": 8}


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update=SMALL)


async def test_what_would_come_too_late_is_not_read(gateway: Gateway, http: httpx.AsyncClient) -> None:
    async with full(gateway) as admission:
        await refused_unread(gateway, http)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 400
    assert admission.check_integrity() == []


async def refused_unread(gateway: Gateway, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "user": "t"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_late")
    assert int(answer.headers["retry-after"]) >= 1
    asked = llm_pb2.GenerateRequest(model=MODEL, token_ids=llm_pb2.TokenIds(ids=[10**6]), tenant="t")
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        call: Any = llm_pb2_grpc.LLMServiceStub(channel).Generate(asked, timeout=500.0)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metrics = (await http.get("/metrics")).text.splitlines()
    assert [line.split()[-1] for line in metrics if line.startswith("tandem_refused_after_seconds_count")] == ["2.0"]
