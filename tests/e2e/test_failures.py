"""`kill -9` of a worker, alone in its role: what is begun goes on after its restart or ends by its deadline.

Null engines that take their time: an answer of 200 tokens 5 s and the prompts together 3 s, so that each signal comes
in the middle of them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, metric, running_cluster
from tests.stalls import running_time

CLUSTER = """
models: [{{{{id: m, name: "null", weights: {{{{path: {model}}}}}}}}}]
workers: {{{{settings: {{{{engine: "null", kv_memory: 8MiB}}}}}}}}
pools:
- {{{{name: prefill, role: prefill, model: m, settings: {{{{null_step: {{{{prefill_tokens_per_s: 2000}}}}}}}}}}}}
- {{{{name: decode, role: decode, model: m, settings: {{{{null_step: {{{{decode_step_s: 0.025}}}}}}}}}}}}
gateway: {{{{settings: {{{{http_port: {{http}}, grpc_port: {{grpc}}, disaggregation: require}}}}}}}}
redis: {{{{port: {{redis}}}}}}
"""
LATE = 30
ROUTED = "tandem_route_seconds_count"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory.mktemp("failures"), file=CLUSTER.format(model=demo_model)) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: RunningCluster) -> RunningCluster:
    """Ready, whatever the test before did to it."""
    eventually(started.ready, BOUND_S, "ready")
    return started


def request(max_tokens: int, prompt: str = "def ") -> llm_pb2.GenerateRequest:
    sampling = llm_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return llm_pb2.GenerateRequest(model="null", prompt=prompt, sampling=sampling)


def succeeds(cluster: RunningCluster) -> bool:
    with grpc.insecure_channel(cluster.grpc) as channel:
        try:
            call = llm_pb2.GenerateUnaryRequest(generate=request(8))
            answer = llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(call, timeout=60)
        except grpc.RpcError:
            return False
    return len(answer.token_ids) == 8


def test_the_only_decode_worker_killed_in_mid_stream(cluster: RunningCluster) -> None:
    """Its answers wait for its restart and go on there."""
    (pid,) = cluster.pids("decode")
    with grpc.insecure_channel(cluster.grpc) as channel:
        stream = llm_pb2_grpc.LLMServiceStub(channel).Generate(request(200), timeout=120)
        tokens = list(next(stream).token_ids)
        os.kill(pid, signal.SIGKILL)
        for response in stream:
            tokens += response.token_ids
    assert len(tokens) == 200
    assert response.path.migrated == 1
    assert cluster.pids("decode") != [pid]
    eventually(cluster.ready, BOUND_S, "ready after the decode worker's restart")


@pytest.mark.parametrize(
    ("path", "asked", "end"),
    [
        ("/v1/completions", {"prompt": "def ", "ignore_eos": True}, '"type":"timeout"'),
        pytest.param(
            "/v1/messages",
            {"messages": [{"role": "user", "content": "def "}]},
            '"type":"timeout_error"',
            marks=pytest.mark.long,
        ),
    ],
)
def test_without_a_decode_worker_a_stream_ends_by_its_deadline_with_a_typed_event(
    cluster: RunningCluster, path: str, asked: dict[str, Any], end: str
) -> None:
    body = {"model": "null", "max_tokens": 1900, "stream": True, **asked}
    (pid,) = cluster.pids("decode")
    events: list[str] = []
    for timeout_ms in ("1500", "6000"):  # the longer one where this machine stood still before the first token
        headers = {"x-request-timeout-ms": timeout_ms}
        url = f"{cluster.http}{path}"
        with running_time() as clock, httpx.stream("POST", url, json=body, timeout=60, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line)
                    if len(events) == 1:
                        os.kill(pid, signal.SIGKILL)  # once: behind each event is an empty line
        if events:
            break
    assert '"error"' in events[-1]
    assert end in events[-1]
    assert clock.ran_s < int(timeout_ms) / 1000 + 1.0
    eventually(cluster.ready, BOUND_S, "ready after the decode worker's restart")
    assert succeeds(cluster)
    assert cluster.pids("decode") != [pid]


def test_prefill_killed_while_prompts_are_prefilled(cluster: RunningCluster) -> None:
    (pid,), routed = cluster.pids("prefill"), metric(cluster.http, ROUTED)
    with grpc.insecure_channel(cluster.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        calls = [
            service.GenerateUnary.future(
                llm_pb2.GenerateUnaryRequest(generate=request(4, f"# {i}\n" + "import os\n" * 150)), timeout=120
            )
            for i in range(8)
        ]
        eventually(lambda: metric(cluster.http, ROUTED) - routed == len(calls), BOUND_S, "the prompts have a worker")
        os.kill(pid, signal.SIGKILL)
        assert {call.code() for call in calls} == {grpc.StatusCode.OK}
        assert any("; after " in call.result().path.reason for call in calls)
    eventually(cluster.ready, BOUND_S, "ready after the prefill worker's restart")
    assert succeeds(cluster)


def test_redis_gone_for_a_moment_fails_no_request(cluster: RunningCluster) -> None:
    """The gateway serves from its last view; workers register again."""
    import psutil

    processes = psutil.Process(cluster.process.pid).children(recursive=True)
    address = cluster.redis_url.rpartition("/")[2]  # there is a second one, for responses that are kept
    (server,) = [one for one in processes if one.name() == "redis-server" and address in " ".join(one.cmdline())]
    server.suspend()
    try:
        assert succeeds(cluster)
    finally:
        server.resume()
    eventually(cluster.ready, BOUND_S, "reconverged")


def sent(cluster: RunningCluster, timeout_ms: int) -> socket.socket:
    """A connection with a request on it."""
    url = httpx.URL(cluster.http)
    connection = socket.create_connection((url.host, url.port), BOUND_S)
    body = b'{"model":"null","prompt":[1,2,3,4],"max_tokens":4}'
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"x-request-timeout-ms: %d\r\ncontent-length: %d\r\n\r\n" % (timeout_ms, len(body)) + body
    )
    return connection


def answer(connection: socket.socket) -> bytes:
    """All of it."""
    with connection, connection.makefile("rb") as file:
        return file.read()


def test_a_gateway_that_stood_still_begins_nothing_that_is_late(cluster: RunningCluster) -> None:
    """Deadlines run from when a request came, not from when the gateway got round to it."""
    (pid,) = cluster.pids("gateway")
    os.kill(pid, signal.SIGSTOP)
    try:
        late, in_time = [sent(cluster, timeout_ms=500) for _ in range(LATE)], sent(cluster, timeout_ms=30_000)
        time.sleep(1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    answers = [answer(connection) for connection in late]
    assert [said.split()[1] for said in answers] == [b"504"] * LATE
    assert all(b"before it was begun" in said for said in answers)
    assert answer(in_time).split()[1] == b"200"


def test_logs_hold_no_traceback_of_ours(cluster: RunningCluster) -> None:
    for path in Path(cluster.logs).glob("*.log"):
        assert "Traceback" not in path.read_text(encoding="utf-8"), path
