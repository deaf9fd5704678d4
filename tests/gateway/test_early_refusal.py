"""A gateway that is full: what would come too late is refused before its prompt is read, at both doors."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from services.gateway.admission import Work
from services.gateway.admission.priority import PriorityClass
from services.gateway.errors import Overloaded
from services.gateway.settings import CLASSES, ClassSettings
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.peers import MODEL

# Its prompt alone would be refused as one that no model takes, were it read.
BODY = {"model": MODEL, "prompt": [10**6] * 40, "max_tokens": 8}


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(
        update={"max_admitted_tokens": 200, "classes": CLASSES | {"interactive": ClassSettings(ttft_s=1.0)}}
    )


async def test_what_would_come_too_late_is_not_read(gateway: Gateway, http: httpx.AsyncClient) -> None:
    admission = gateway.front.llm_of(None).admission
    for _ in range(3):  # what the forecast is made from
        done = Work(PriorityClass.INTERACTIVE, "t", 1e9, 100, 100)
        await admission.enter(done)
        await asyncio.sleep(0.1)
        admission.wrote(done, 100)
        admission.leave(done)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 400
    held, tasks, deadline = list[Work](), list[asyncio.Task[None]](), asyncio.get_running_loop().time() + 100
    while True:
        held.append(Work(PriorityClass.INTERACTIVE, "t", deadline, 100, 100))
        tasks.append(asyncio.create_task(admission.enter(held[-1])))
        await asyncio.wait(tasks[-1:], timeout=0.001)
        if tasks[-1].done() and isinstance(tasks[-1].exception(), Overloaded):
            break
    answer = await http.post("/v1/completions", json={**BODY, "user": "t"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_late")
    assert int(answer.headers["retry-after"]) >= 1
    asked = llm_pb2.GenerateRequest(model=MODEL, token_ids=llm_pb2.TokenIds(ids=[10**6]), tenant="t")
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        call: Any = llm_pb2_grpc.LLMServiceStub(channel).Generate(asked, timeout=500.0)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metrics = (await http.get("/metrics")).text.splitlines()
    assert [line.split()[-1] for line in metrics if line.startswith("tandem_refused_after_seconds_count")] == ["2.0"]
    for work, task in zip(held, tasks, strict=True):
        task.cancel()
        admission.leave(work)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.check_integrity() == []
