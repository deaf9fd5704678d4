"""I5: one trace per request, received over real OTLP, every hop parented."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.e2e.collector import Collector, collecting


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, collector: tuple[Collector, str]) -> Iterator[RunningCluster]:
    folder: Path = tmp_path_factory.mktemp("trace")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector[1], "OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_LOGS_EXPORTER": "otlp",
           "OTEL_BLRP_SCHEDULE_DELAY": "200", "OTEL_METRICS_EXPORTER": "otlp",
           "OTEL_METRIC_EXPORT_INTERVAL": "200"}  # fmt: skip
    with running_cluster(folder, "--disaggregation=require", env=env) as cluster:
        yield cluster


EXPECTED = {
    ("tandem-gateway", "text_completion tandem-demo"),
    ("tandem-gateway", "queue"),
    ("tandem-gateway", "route"),
    ("tandem-gateway", "reserve"),
    ("tandem-prefill", "prefill"),
    ("tandem-prefill", "kv.transfer"),
    ("tandem-decode", "decode"),
}


def attributes(span: Span | LogRecord) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes}


def check_decode(spans: list[tuple[str, Span]]) -> None:
    """The worker's span is within the gateway's."""
    decode = next(span for service, span in spans if (service, span.name) == ("tandem-gateway", "decode"))
    assert attributes(decode)["decode.tokens"] == 8
    work = next(span for service, span in spans if (service, span.name) == ("tandem-decode", "decode"))
    assert work.parent_span_id == decode.span_id
    assert decode.start_time_unix_nano <= work.start_time_unix_nano <= decode.end_time_unix_nano


def check_record(collector: Collector, trace_id: str) -> None:
    """It leaves as a log, too."""
    eventually(lambda: trace_id in collector.logs, BOUND_S, "the request's record arrives")
    record = collector.logs[trace_id]
    told = attributes(record)
    assert (record.body.string_value, told["outcome"], told["output_tokens"]) == ("request", "ok", 8)
    assert told["batch_size"] == 1
    assert 0 < told["kv_usage"] < 1
    check_metrics(collector)


GENAI = {
    "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    "gen_ai.client.token.usage",
}  # fmt: skip


def check_metrics(collector: Collector) -> None:
    """They leave by OTLP, too."""
    eventually(lambda: collector.metrics.keys() >= GENAI, BOUND_S, "metrics arrive")
    for name in GENAI:
        for point in collector.metrics[name].histogram.data_points:
            told = {a.key: a.value.string_value for a in point.attributes}
            assert (told["gen_ai.provider.name"], told["gen_ai.request.model"]) == ("tandem", "tandem-demo")
            assert point.count
            # Tokens that come as one message have no time between them.
            assert point.sum > 0 or name == "gen_ai.server.time_per_output_token"


def test_one_request_is_one_tree(cluster: RunningCluster, collector: tuple[Collector, str]) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "tandem-demo", "prompt": "import os\n" * 40, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.http}/v1/completions",
        json=body,
        headers={"traceparent": f"00-{trace_id}-{parent_id}-01"},
        timeout=60,
    )
    assert answer.status_code == 200
    eventually(lambda: collector[0].names(trace_id) >= EXPECTED, BOUND_S, "every span of the request arrives")
    root_name = "text_completion tandem-demo"
    eventually(lambda: not collector[0].orphans(trace_id, root_name), BOUND_S, "every span has its parent")
    spans = collector[0].spans[trace_id]
    by_id = {span.span_id.hex(): span for _, span in spans}
    root = next(span for _, span in spans if span.name == "text_completion tandem-demo")
    assert root.parent_span_id.hex() == parent_id
    transfer = next(span for _, span in spans if span.name == "kv.transfer")
    assert by_id[transfer.parent_span_id.hex()].name == "prefill"
    moved = attributes(transfer)
    assert moved["kv.transfer.bytes"] > 0
    assert moved["kv.transfer.layers"] == 8
    assert moved["kv.transfer.blocks"] > 1
    assert moved["kv.transfer.peer"] == "decode-0"
    assert moved["kv.transfer.peer_incarnation"]
    assert 0 < moved["kv.transfer.exposed_s"] < moved["kv.transfer.tail_s"] < 5
    assert 0 < moved["kv.transfer.push_s"] < 5
    lasted = (transfer.end_time_unix_nano - transfer.start_time_unix_nano) / 1e9
    assert moved["kv.transfer.overlap_ratio"] == pytest.approx(1 - moved["kv.transfer.exposed_s"] / lasted, abs=0.1)
    pushes = [event for event in transfer.events if event.name == "layer"]
    assert len(pushes) == 8 * sum(event.name == "chunk" for event in by_id[transfer.parent_span_id.hex()].events)
    check_decode(spans)
    assert [event.name for event in root.events] == ["first_token"]
    usage = attributes(root)
    assert 0 < usage["gen_ai.latency.time_to_first_token"] < 60
    assert usage["http.response.status_code"] == 200
    assert usage["gen_ai.request.model"] == "tandem-demo"
    assert usage["gen_ai.usage.output_tokens"] == 8
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans)
    check_record(collector[0], trace_id)


def test_a_recent_request_is_remembered_with_its_workers_part(cluster: RunningCluster) -> None:
    """Each push of a layer lies within the chunk that made it."""
    body = {"model": "tandem-demo", "prompt": "import sys\n" * 200, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60)
    found = httpx.get(f"{cluster.http}/debug/traces/{answer.headers['x-request-id']}", timeout=60).json()
    assert found["missing"] == []
    processes = dict.fromkeys(row["process"].split()[0] for row in found["rows"])
    assert [*processes] == ["tandem-gateway", "tandem-decode", "tandem-prefill"]
    rows = {row["name"]: row for row in found["rows"]}
    chunks, pushes = rows["chunks"]["bars"], rows["layer pushes"]["bars"]
    assert len(chunks) > 1
    assert len(pushes) == 8 * len(chunks)
    for push in pushes:
        (made,) = (c for c in chunks if c["args"]["first_block"] == push["args"]["first_block"])
        assert made["at"] <= push["at"] <= push["at"] + push["took"] <= made["at"] + made["took"] + 0.001
    assert all(rows[name]["marks"] for name in ("first_token", "step", "landed"))


def test_a_worker_profiles_itself(cluster: RunningCluster, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = [
        sys.executable,
        "-m",
        "tandem",
        "profile",
        "decode-0",
        "--seconds=0.3",
        f"--redis-url={cluster.redis_url}",
    ]
    subprocess.run([*command, f"--out={out}"], check=True, timeout=60)
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["name"] == "decode-0"
    assert "engine" in {profile["name"] for profile in made["profiles"]}
    wrong = subprocess.run(
        [*command[:4], "nobody", *command[5:]], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert (wrong.returncode, "decode-0" in wrong.stderr) == (1, True)


def test_a_follow_up_turn_says_what_each_side_had_cached(
    cluster: RunningCluster, collector: tuple[Collector, str]
) -> None:
    """Decode kept its own answer, but for the last token's KV; prefill the first prompt, and may fetch the answer."""
    prompt, sampling = [7, 11, 13, 17] * 20, llm_pb2.SamplingParams(max_tokens=33, temperature=0, ignore_eos=True)
    with grpc.insecure_channel(cluster.grpc) as channel:
        for trace_id in ("2af7651916cd43dd8448eb211c80319e", "3af7651916cd43dd8448eb211c80319f"):
            asked = llm_pb2.GenerateRequest(
                model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling
            )
            answer = llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(
                llm_pb2.GenerateUnaryRequest(generate=asked),
                timeout=60, metadata=[("traceparent", f"00-{trace_id}-b7ad6b7169203331-01")],
            )  # fmt: skip
            prompt += [*answer.token_ids, 37, 41, 43]
    sides = {("tandem-prefill", "prefill"), ("tandem-prefill", "kv.transfer"), ("tandem-decode", "decode")}
    eventually(lambda: collector[0].names(trace_id) >= sides, BOUND_S, "both sides' spans arrive")
    prefill, transfer, decode = (
        attributes(next(span for service, span in collector[0].spans[trace_id] if (service, span.name) == side))
        for side in (("tandem-prefill", "prefill"), ("tandem-prefill", "kv.transfer"), ("tandem-decode", "decode"))
    )
    assert answer.path.fetched_tokens in (0, 32)  # by what seems quicker, once the registry knows of the answer
    assert prefill["prefill.cached_tokens"] == 80 + answer.path.fetched_tokens
    assert not answer.path.fetched_tokens or ("tandem-prefill", "kv.fetch") in collector[0].names(trace_id)
    assert decode["decode.cached_tokens"] == 112
    assert transfer["kv.transfer.blocks"] == 1


def test_a_failed_request_has_a_failed_span(cluster: RunningCluster, collector: tuple[Collector, str]) -> None:
    trace_id = "1af7651916cd43dd8448eb211c80319d"
    body = {"model": "tandem-demo", "prompt": "def ", "max_tokens": 1900, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-timeout-ms": "300"}
    assert httpx.post(f"{cluster.http}/v1/completions", json=body, headers=headers, timeout=60).status_code == 504
    root_name = ("tandem-gateway", "text_completion tandem-demo")
    eventually(lambda: root_name in collector[0].names(trace_id), BOUND_S, "the root span arrives")
    root = next(s for _, s in collector[0].spans[trace_id] if s.name == "text_completion tandem-demo")
    assert root.status.code == 2
    known = attributes(root)
    assert known["http.response.status_code"] == 504
    if "first_token" not in [event.name for event in root.events]:
        assert not any(name.startswith("gen_ai.usage") for name in known)


@pytest.mark.parametrize(
    ("trace", "body", "status", "kind"),
    [
        ("4a", {"model": "tandem-demo", "prompt": "def ", "max_tokens": -1}, 400, "invalid_request_error"),
        ("4b", {"model": "another", "prompt": "def "}, 404, "invalid_request_error"),
    ],
)
def test_a_refused_request_is_one_failed_span(
    cluster: RunningCluster, collector: tuple[Collector, str],
    trace: str, body: dict[str, object], status: int, kind: str,
) -> None:  # fmt: skip
    trace_id, parent_id = f"{trace}f7651916cd43dd8448eb211c80319d", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "x-request-id": f"req-{trace}"}
    assert httpx.post(f"{cluster.http}/v1/completions", json=body, headers=headers, timeout=60).status_code == status
    eventually(lambda: bool(collector[0].names(trace_id)), BOUND_S, "the span arrives")
    [(service, span)] = collector[0].spans[trace_id]
    assert (service, span.name, span.parent_span_id.hex()) == ("tandem-gateway", "refused", parent_id)
    assert span.status.code == 2
    known = attributes(span)
    assert (known["http.response.status_code"], known["error.type"]) == (status, kind)
    assert known["gen_ai.request.id"] == f"req-{trace}"
    assert 0 <= known["tandem.refused.after_s"] < 60
