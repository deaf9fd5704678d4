"""The official clients against a running cluster."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from services.gateway.door.pings import HEAD_S
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster
from tests.marks import long_but

MODEL = "tandem-demo"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def client(shm_cluster: RunningCluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shm_cluster.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_completion_streamed_equals_completion_whole(client: OpenAI) -> None:
    options = {"model": MODEL, "prompt": "def read_file(path", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**options)
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    assert whole.choices[0].text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("length", "stop")


def test_chat(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "import os"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"


def test_seeded_choices_and_logprobs(client: OpenAI) -> None:
    options = {
        "model": MODEL,
        "prompt": "class ",
        "max_tokens": 12,
        "temperature": 1.0,
        "n": 3,
        "seed": 5,
        "logprobs": 2,
    }
    one, two = client.completions.create(**options), client.completions.create(**options)
    assert [c.text for c in one.choices] == [c.text for c in two.choices]
    assert len({c.text for c in one.choices}) > 1
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens)
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_stop_text_ends_the_answer(client: OpenAI) -> None:
    options = {"model": MODEL, "prompt": "import os\nimport ", "max_tokens": 60, "temperature": 0}
    free = client.completions.create(**options).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    stopped = client.completions.create(**options, stop=stop).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"


def test_errors_name_the_field(client: OpenAI, shm_cluster: RunningCluster) -> None:
    with pytest.raises(NotFoundError) as unknown:
        client.completions.create(model="nope", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as hot:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert hot.value.param == "temperature"
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    assert long.value.code == "context_length_exceeded"
    assert httpx.post(f"{shm_cluster.http}/v1/completions", content=b"{").status_code == 400


def test_every_answer_says_which_way_it_went(client: OpenAI, shm_cluster: RunningCluster) -> None:
    options = {"model": MODEL, "prompt": "import os\n" * 30, "max_tokens": 4, "temperature": 0}
    whole = client.completions.with_raw_response.create(**options)
    began = time.monotonic()
    streamed = client.completions.with_raw_response.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    head_s = time.monotonic() - began
    *_, last = streamed.parse()
    with grpc.insecure_channel(shm_cluster.grpc) as channel:
        asked = llm_pb2.GenerateRequest(model=MODEL, prompt="x = ", sampling=llm_pb2.SamplingParams(max_tokens=4))
        call = llm_pb2_grpc.LLMServiceStub(channel).Generate(asked)
        *_, message = call
        trailers = dict(call.trailing_metadata())
    assert int(trailers["x-tandem-transfer-bytes"]) == message.path.transfer_bytes > 0
    early = "x-tandem-path" not in streamed.headers
    assert not early or head_s >= HEAD_S, "a head leaves without its way only where the first token takes too long"
    answers = [(whole.headers, whole.parse().usage.tandem), (streamed.headers, last.usage.tandem)]
    for headers, ways in answers[: 1 if early else 2]:
        (way,) = ways
        assert (headers["x-tandem-path"], headers["x-tandem-transport"]) == (way["path"], way["transport"])
        assert int(headers["x-tandem-transfer-bytes"]) == way["transfer_bytes"] > 0
        assert int(headers["x-tandem-cached-tokens"]) == way["cached_tokens"]
        assert headers["x-tandem-reason"] == way["reason"]
    for told in (whole.headers, *([] if early else [streamed.headers]), trailers):
        assert told["x-tandem-path"] == "remote"
        assert told["x-tandem-reason"].startswith("remote prefill: ")


@pytest.mark.parametrize(
    "name", long_but(["chat.sh", "generate.py"], sorted(path.name for path in EXAMPLES.iterdir() if path.is_file()))
)
def test_examples_run(shm_cluster: RunningCluster, name: str) -> None:
    command = {".py": sys.executable, ".mjs": "node", ".sh": "sh"}[Path(name).suffix]
    if shutil.which(command) is None:
        pytest.skip(f"no {command} on this machine")
    address = shm_cluster.grpc if name == "generate.py" else shm_cluster.http
    done = subprocess.run([command, EXAMPLES / name, address], capture_output=True, encoding="utf-8", timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lines" in done.stdout


async def test_grpc_service_health_and_reflection(shm_cluster: RunningCluster) -> None:
    async with aio.insecure_channel(shm_cluster.grpc) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="tandem.v1.LLMService"), timeout=60
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        for version in ("v1", "v1alpha"):
            reflect = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = [answer async for answer in reflect(iter([question]), timeout=60)]
            assert "tandem.v1.LLMService" in {s.name for s in answers[0].list_services_response.service}
        service = llm_pb2_grpc.LLMServiceStub(channel)
        request = llm_pb2.GenerateRequest(model=MODEL, prompt="import ", sampling=llm_pb2.SamplingParams(max_tokens=8))
        unary = await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request), timeout=60)
        assert unary.usage.completion_tokens == len(unary.token_ids)
        with pytest.raises(aio.AioRpcError) as refused:
            await service.GenerateUnary(
                llm_pb2.GenerateUnaryRequest(generate=llm_pb2.GenerateRequest(model="nope", prompt="x")), timeout=60
            )
        assert refused.value.code() is StatusCode.NOT_FOUND
        assert "model" in (refused.value.details() or "")


@pytest.mark.long
async def test_two_hundred_streams_finish(
    shm_cluster: RunningCluster, at_baseline: Callable[[RunningCluster], object]
) -> None:
    client = AsyncOpenAI(base_url=f"{shm_cluster.http}/v1", api_key="none", max_retries=0, timeout=100)

    async def stream(i: int) -> int:
        parts = await client.completions.create(
            model=MODEL, prompt=f"def function_{i}(", max_tokens=24, stream=True, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )  # fmt: skip
        tokens = 0
        async for part in parts:
            tokens = part.usage.completion_tokens if part.usage else tokens
        return tokens

    async with client:
        assert await asyncio.gather(*(stream(i) for i in range(200))) == [24] * 200
    await _becomes_baseline(shm_cluster, at_baseline)


async def test_disconnect_and_cancel_free_everything(
    shm_cluster: RunningCluster, at_baseline: Callable[[RunningCluster], object]
) -> None:
    body = {"model": MODEL, "prompt": "def ", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    async with (
        httpx.AsyncClient() as http,
        http.stream("POST", f"{shm_cluster.http}/v1/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
    async with aio.insecure_channel(shm_cluster.grpc) as channel:
        call = llm_pb2_grpc.LLMServiceStub(channel).Generate(
            llm_pb2.GenerateRequest(
                model=MODEL, prompt="def ", sampling=llm_pb2.SamplingParams(max_tokens=1500, ignore_eos=True)
            )
        )
        await call.read()
        call.cancel()
        await _becomes_baseline(shm_cluster, at_baseline)


async def test_a_deadline_ends_the_request_everywhere(
    shm_cluster: RunningCluster, at_baseline: Callable[[RunningCluster], object]
) -> None:
    async with aio.insecure_channel(shm_cluster.grpc) as channel:
        request = llm_pb2.GenerateRequest(
            model=MODEL, prompt="def ", sampling=llm_pb2.SamplingParams(max_tokens=1900, ignore_eos=True)
        )
        with pytest.raises(aio.AioRpcError) as late:
            async for _ in llm_pb2_grpc.LLMServiceStub(channel).Generate(request, timeout=0.5):
                pass
        assert late.value.code() is StatusCode.DEADLINE_EXCEEDED
    body = {"model": MODEL, "prompt": "def ", "max_tokens": 1900, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"{shm_cluster.http}/v1/completions", json=body, headers={"x-request-timeout-ms": "400"}
        )
    assert answer.status_code == 504
    await _becomes_baseline(shm_cluster, at_baseline)


async def _becomes_baseline(cluster: RunningCluster, at_baseline: Callable[[RunningCluster], object]) -> None:
    """How soon, the fault explorer judges."""
    async with asyncio.timeout(60):
        while not await at_baseline(cluster):  # type: ignore[misc]
            await asyncio.sleep(0.05)
