"""One request is one tree of spans, and workers are called within it."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from services.gateway import Gateway
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_failures import received
from tests.spans import attributes, catalogued, seen

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 5, "stop": "nothing"}


def ours(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {s.name: s for s in exporter.get_finished_spans() if f"{s.context.trace_id:032x}" == TRACE}


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63, 2**64 - 1])
async def test_every_seed_leaves_the_process(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """As a signed number of 64 bits, which is what an exporter takes."""
    assert (await http.post("/v1/completions", json=BODY | {"seed": seed}, headers=HEADERS)).status_code == 200
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    (root,) = (span for name, span in ours(spans).items() if name == f"text_completion {MODEL}")
    (said,) = encode_spans([root]).resource_spans[0].scope_spans[0].spans
    values = {one.key: one.value.int_value for one in said.attributes}
    assert values["gen_ai.request.seed"] % 2**64 == seed
    assert not caplog.records


async def test_one_tree(spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers) -> None:
    await http.post("/v1/completions", json=BODY, headers=HEADERS)
    root_name = f"text_completion {MODEL}"
    await eventually(lambda: set(ours(spans)) == {root_name, "queue", "route", "reserve", "prefill", "decode"})
    found = ours(spans)
    root = found[root_name]
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    children = [span for name, span in found.items() if name != root_name]
    assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}
    assert root.status.status_code is StatusCode.UNSET
    assert dict(root.attributes or {}).items() >= {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": MODEL, "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.output_tokens": 5, "gen_ai.usage.completion_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.request.stop_sequences": ("nothing",),
        "tandem.path": "remote",
    }.items()  # fmt: skip
    assert (found["prefill"].attributes or {})["kv.transfer.bytes"] == 4096


async def test_workers_are_called_within_their_spans(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers
) -> None:
    await http.post("/v1/completions", json=BODY, headers=HEADERS)
    await eventually(lambda: len(ours(spans)) == 6)
    for name, peer in (("decode", peers.decode), ("prefill", peers.prefill)):
        _, trace_id, span_id, _ = peer.seen[0].trace_context["traceparent"].split("-")
        assert trace_id == TRACE
        assert span_id == f"{ours(spans)[name].context.span_id:016x}"


async def test_a_failed_request_has_failed_spans(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers
) -> None:
    peers.prefill.hold.clear()
    answer = await http.post("/v1/completions", json=BODY, headers={**HEADERS, "x-request-timeout-ms": "3000"})
    assert answer.status_code == 504
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    for name in (f"text_completion {MODEL}", "prefill"):
        assert ours(spans)[name].status.status_code is StatusCode.ERROR
        assert (ours(spans)[name].attributes or {})["error.type"] == "timeout"


async def test_a_stop_string_is_no_failure(spans: InMemorySpanExporter, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={**BODY, "stop": "quick", "max_tokens": 50}, headers=HEADERS)
    await eventually(lambda: len(ours(spans)) == 6)
    assert {span.status.status_code for span in ours(spans).values()} == {StatusCode.UNSET}


@pytest.mark.usefixtures("patient")
async def test_a_migration_is_a_span_linked_to_the_one_that_was_lost(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    """I5, R20: what was lost is marked as failed, and what goes on is part of the same tree."""
    peers.decode.step_s = 0.01
    body = {**BODY, "max_tokens": 100, "ignore_eos": True}
    request = asyncio.create_task(http.post("/v1/completions", json=body, headers=HEADERS))
    await eventually(lambda: received(gateway) > 5)
    peers.decode.break_streams()
    assert (await request).headers["x-tandem-migrated"] == "1"
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    migration, root = ours(spans)["migration"], ours(spans)[f"text_completion {MODEL}"]
    decodes = [span for span in spans.get_finished_spans() if span.name == "decode"]
    lost, goes_on = sorted(decodes, key=lambda span: span.start_time or 0)
    assert [link.context for link in migration.links] == [lost.context]
    assert lost.status.status_code is StatusCode.ERROR
    assert {span.parent and span.parent.span_id for span in (migration, lost, goes_on)} == {root.context.span_id}
    assert (lost.end_time or 0) <= (migration.start_time or 0) <= (migration.end_time or 0) <= (root.end_time or 0)
    told = migration.attributes or {}
    assert told["tandem.migration.from"] == "d"
    assert told["tandem.migration.reason"]
    assert told["tandem.migration.written_tokens"] == peers.decode.seen[-1].num_prior_tokens > 5
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (llm_pb2.GenerateRequest(model=MODEL, request_id="refused"), grpc.StatusCode.INVALID_ARGUMENT),
        (llm_pb2.GenerateRequest(model="another", prompt="x", request_id="refused"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_a_refused_call_is_one_failed_span(
    spans: InMemorySpanExporter, gateway: Gateway, asked: llm_pb2.GenerateRequest, code: grpc.StatusCode
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(
                llm_pb2.GenerateUnaryRequest(generate=asked), metadata=tuple(HEADERS.items())
            )
    assert error.value.code() is code
    await eventually(lambda: bool(ours(spans)))
    [(name, span)] = ours(spans).items()
    assert (name, span.status.status_code) == ("refused", StatusCode.ERROR)
    assert f"{span.parent.span_id:016x}" == PARENT
    told = dict(span.attributes or {})
    assert (told["gen_ai.request.id"], told["rpc.grpc.status_code"]) == ("refused", code.value[0])


async def test_of_the_hops_only_the_one_that_failed_is_marked(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers
) -> None:
    peers.prefill.hold.clear()
    await http.post("/v1/completions", json=BODY, headers={**HEADERS, "x-request-timeout-ms": "2000"})
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    failed = {name for name, span in ours(spans).items() if span.status.status_code is StatusCode.ERROR}
    assert failed == {f"text_completion {MODEL}", "prefill"}


async def test_a_request_that_failed_has_no_usage_and_its_hops_say_that_they_were_truncated(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers
) -> None:
    peers.prefill.hold.clear()
    await http.post("/v1/completions", json=BODY, headers={**HEADERS, "x-request-timeout-ms": "2000"})
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    root = attributes(ours(spans)[f"text_completion {MODEL}"])
    assert not [name for name in root if name.startswith("gen_ai.usage")]
    assert (root["tandem.sampling.hint"], root["kv.transfer.bytes"]) == ("failed", 0)
    truncated = {name for name, span in ours(spans).items() if "tandem.truncated" in attributes(span)}
    assert truncated == {"prefill", "decode"}
    assert attributes(ours(spans)["decode"])["decode.tokens"] == 0


async def test_a_client_that_leaves_truncates_what_it_left_and_no_hop_is_at_fault(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers
) -> None:
    peers.decode.step_s = 0.05
    body = {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body, headers=HEADERS) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    assert attributes(ours(spans)["decode"])["tandem.truncated"]
    failed = {name for name, span in ours(spans).items() if span.status.status_code is StatusCode.ERROR}
    assert failed == {f"text_completion {MODEL}"}
    root = attributes(ours(spans)[f"text_completion {MODEL}"])
    assert (root["error.type"], root["http.response.status_code"]) == ("client_left", 499)
    assert "tandem.sampling.hint" not in root


async def test_a_request_that_missed_a_target_says_that_it_is_slow(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers
) -> None:
    peers.decode.step_s = 0.05
    await http.post("/v1/completions", json=BODY, headers={**HEADERS, "x-llm-d-slo-tpot-ms": "1"})
    await eventually(lambda: f"text_completion {MODEL}" in ours(spans))
    assert attributes(ours(spans)[f"text_completion {MODEL}"])["tandem.sampling.hint"] == "slow"


async def recorded(spans: InMemorySpanExporter, num_roots: int = 1) -> None:
    """Until so many requests have ended."""
    await eventually(
        lambda: sum(" " in one.name or one.name == "refused" for one in spans.get_finished_spans()) == num_roots
    )


@pytest.mark.usefixtures("patient")
async def test_the_catalogue_says_what_a_gateway_records(
    spans: InMemorySpanExporter, http: httpx.AsyncClient, peers: Peers, gateway: Gateway
) -> None:
    """A whole answer, one that is tried again, one that fails, one that is refused."""
    said = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    await http.post("/v1/completions", json=BODY | said)
    peers.prefill.refuse = grpc.StatusCode.UNAVAILABLE
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.headers.get("x-tandem-migrated") == "1", (answer.status_code, answer.text, answer.headers)
    peers.prefill.refuse = None
    peers.prefill.hold.clear()
    await http.post("/v1/completions", json=BODY, headers={"x-request-timeout-ms": "1000"})
    gateway.shared.state.stopping = True
    assert (await http.post("/v1/completions", json=BODY)).status_code == 503
    await recorded(spans, 4)
    expected = catalogued("gateway")
    assert seen(gateway_spans(spans), *expected) == expected
    retries = [span for span in gateway_spans(spans) if span.name == "migration"]
    assert attributes(retries[0])["tandem.migration.written_tokens"] == 0
    (lost,) = (link.context.span_id for link in retries[0].links)
    (hop,) = (span for span in gateway_spans(spans) if span.context.span_id == lost)
    assert (hop.name, hop.status.status_code) == ("prefill", StatusCode.ERROR)


def gateway_spans(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [
        span for span in exporter.get_finished_spans()
        if span.instrumentation_scope and span.instrumentation_scope.name == "tandem.gateway"
    ]  # fmt: skip
