"""One record per request, whichever door it came by, and nothing in it that it should not tell."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc import aio
from structlog.testing import capture_logs

from services.gateway import Gateway
from services.gateway.__main__ import _dumps
from services.gateway.telemetry.records import AT_ONCE, RequestRecords
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL

pytestmark = pytest.mark.usefixtures("info_logs")
PROMPT = "a prompt that no log may hold"


def of_requests(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] in ("request", "request refused")]


async def test_a_request_of_each_door_leaves_one_record(http: httpx.AsyncClient, gateway: Gateway) -> None:
    with capture_logs() as logs:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "user": "acme"}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "by-http"})
        async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            asked = llm_pb2.GenerateRequest(model=MODEL, prompt=PROMPT, tenant="acme", request_id="by-grpc")
            asked.sampling.max_tokens = 5
            await llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked))
        await eventually(lambda: len(of_requests(logs)) == 2)
    for line, name in zip(of_requests(logs), ("by-http", "by-grpc"), strict=True):
        assert line.items() >= {
            "event": "request", "request_id": name, "tenant": "acme", "priority_class": "interactive", "status": 200,
            "outcome": "ok", "path": "remote", "prefill_worker": "p", "decode_worker": "d", "output_tokens": 5,
            "prompt_tokens": answer.json()["usage"]["prompt_tokens"], "transfer_bytes": 4096, "batch_size": 2,
            "kv_usage": 0.25,
        }.items()  # fmt: skip
        assert 0 < line["ttft_s"] <= line["whole_s"]
        assert 0 < line["itl_p50_s"] <= line["itl_p99_s"]
    assert PROMPT not in str(logs)


@pytest.mark.parametrize(
    ("wrong", "status", "code"), [({"n": -1}, 400, None), ({"model": PROMPT}, 404, "model_not_found")]
)
async def test_a_refused_request_leaves_one_that_does_not_quote_it(
    http: httpx.AsyncClient, wrong: dict[str, Any], status: int, code: str | None
) -> None:
    with capture_logs() as logs:
        body = {"model": MODEL, "prompt": PROMPT, **wrong}
        assert (await http.post("/v1/completions", json=body, headers={"x-request-id": "x"})).status_code == status
        await eventually(lambda: bool(of_requests(logs)))
    (line,) = of_requests(logs)
    assert line["event"] == "request refused"
    assert (line["request_id"], line["status"], line.get("code")) == ("x", status, code)
    assert PROMPT not in str(logs)


async def test_records_are_written_together_and_few_wait() -> None:
    records = RequestRecords()
    with capture_logs() as logs:
        for number in range(AT_ONCE + 1):
            records.add("request", partial(dict, request_id=str(number)))
            assert len(logs) == (AT_ONCE if number + 1 >= AT_ONCE else 0)
        records.write()  # as at a gateway's end
    assert [line["request_id"] for line in logs] == [str(number) for number in range(AT_ONCE + 1)]


@pytest.mark.parametrize("value", [1, "é", 2**70, "\ud800", {"deep": [1.5, None]}], ids=repr)
def test_a_log_line_says_what_json_says(value: Any) -> None:
    assert json.loads(_dumps({"value": value, "other": Path("/x")}, str)) == {"value": value, "other": "/x"}
