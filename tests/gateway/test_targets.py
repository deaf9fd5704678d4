"""Targets of latency: by class, and by the request's own headers, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Any

import grpc
import httpx
import pytest
from pydantic import ValidationError

from services.gateway import Gateway
from services.gateway.admission.targets import Targets, targets_of
from services.gateway.errors import InvalidRequest
from services.gateway.routing import Router, RouteRequest
from services.gateway.server import PREFILL_QUEUE_TOKENS
from services.gateway.settings import Disaggregation, GatewaySettings
from tandem import rpc
from tandem.registry import Route
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import with_settings
from tests.gateway.peers import MODEL, Peers

BODY = {"model": MODEL, "prompt": "x", "seed": 0}
TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    given = {**settings.model_dump(), "classes": {"batch": {"itl_s": 0.5}, "realtime": {"ttft_s": 2.0}}}
    return GatewaySettings.model_validate(given)


@pytest.mark.parametrize(
    ("classes", "named"),
    [
        ({"urgent": {}}, "'realtime', 'interactive' or 'batch'"),
        ({"batch": {"ttft": 1}}, "batch.ttft"),
        ({"batch": {"weight": 0}}, "batch.weight"),
        ({"batch": 3}, "batch"),
        ([], "dictionary"),
    ],
)
def test_a_wrong_class_is_named(settings: GatewaySettings, classes: object, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GatewaySettings.model_validate({**settings.model_dump(), "classes": classes})


def test_headers_go_before_the_class(settings: GatewaySettings) -> None:
    assert targets_of({}, 1, settings) == Targets(None, 0.5, inf, None)
    assert targets_of({}, -1, settings) == Targets(2.0, 0.1, inf, 2.0)
    assert targets_of({TTFT: "1500", TPOT: "40"}, 1, settings) == Targets(1.5, 0.04, inf, 1.5)


@pytest.mark.parametrize("said", ["soon", "", "0", "-1", "nan", "inf", "1e12"])
@pytest.mark.parametrize("name", [TTFT, TPOT])
def test_what_is_no_target_is_named(settings: GatewaySettings, name: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        targets_of({name: said}, 0, settings)


async def test_workers_are_told_the_target_between_tokens(http: httpx.AsyncClient, peers: Peers) -> None:
    for body, headers in ((BODY, {}), (BODY, {TPOT: "40"}), ({**BODY, "service_tier": "flex"}, {})):
        assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert [spec.itl_target_ms for spec in peers.decode.seen] == [100, 40, 500]


async def test_a_bad_header_is_a_400(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=BODY, headers={TPOT: "soon"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == TPOT


async def test_grpc_metadata_says_the_same(gateway: Gateway, peers: Peers) -> None:
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        request = llm_pb2.GenerateUnaryRequest(generate=llm_pb2.GenerateRequest(model=MODEL, prompt="x"))
        await stub.GenerateUnary(request, metadata=((TPOT, "70"),))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GenerateUnary(request, metadata=((TTFT, "soon"),))
    assert peers.decode.seen[0].itl_target_ms == 70
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert TTFT in str(raised.value.details())


@with_settings(classes={"interactive": {"ttft_s": 30.0}})
async def test_routing_is_told_what_is_left_until_the_first_token(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, choose = list[float](), Router.choose

    async def noting(self: Router, request: RouteRequest, exclude: Collection[str]) -> Route:
        asked.append(request.ttft_target_s)
        return await choose(self, request, exclude)

    monkeypatch.setattr(Router, "choose", noting)
    for body, headers in ((BODY, {TTFT: "60000"}), (BODY, {}), ({**BODY, "service_tier": "flex"}, {})):
        assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    by_header, by_class, without = asked
    assert 0 < by_header <= 60
    assert 0 < by_class <= 30 < by_header
    assert without == 0


@with_settings(disaggregation=Disaggregation.AUTO)
async def test_under_auto_admission_counts_decode_workers_among_those_that_prefill(gateway: Gateway) -> None:
    capacity = gateway.directory.llm_of(None).admission.admitted.capacity
    assert capacity is not None
    assert capacity.prompt_tokens == 2 * PREFILL_QUEUE_TOKENS
