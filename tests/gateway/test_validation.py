"""The gateway refuses bad requests and names the field. No worker is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from services.gateway import Gateway
from services.gateway.__main__ import make_gateway
from tandem import rpc
from tandem.local import RedisServer
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import lonely_gateway, make_settings
from tests.gateway.peers import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")
Sampling = llm_pb2.SamplingParams
HELLO = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lonely(model_folder: Path, redis: RedisServer) -> AsyncIterator[Gateway]:
    """A gateway without workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.gateway.directory.llm.MAX_CHOICES", 8)
        async with lonely_gateway(make_settings(redis)) as gateway:
            yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(lonely: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{lonely.settings.http_port}") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(lonely: Gateway) -> AsyncIterator[Any]:
    async with rpc.channel(f"127.0.0.1:{lonely.grpc_port}") as channel:
        yield llm_pb2_grpc.LLMServiceStub(channel)


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 7]}, "prompt[1]"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt[0]"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"prompt": ["a", "b", "c"], "n": 3}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21, "echo": True}, "logprobs"),
    ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ({"suffix": "after"}, "suffix"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"store": "yes"}, "store"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"priority": 2**40}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"service_tier": "v" * 600}, "service_tier"),
    ({"prompt_cache_key": "k" * 600}, "prompt_cache_key"),
    ({"service_tier": "flex", "priority": -1}, "service_tier"),
    ({"user": 7}, "user"),
    ({"user": "u" * 300}, "user"),
    ({"user": "a\nb"}, "user"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"speculative": "ngram"}, "speculative"),
    ({"speculative": {"num_tokens": 3}}, "speculative.method"),
    ({"speculative": {"method": "oracle"}}, "speculative.method"),
    ({"speculative": {"method": "ngram", "num_tokens": 17}}, "speculative.num_tokens"),
    ({"speculative": {"method": "ngram", "model": "x"}}, "speculative.model"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**20}, "truncate_prompt_tokens"),
    ({"logprobs": -1}, "logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [1]}, "bad_words[0]"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"model": 7}, "model"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),  # the model has no format of its own
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"verbosity": 7}, "verbosity"),
    ({"prediction": "x"}, "prediction"),
    ({"reasoning_effort": "x" * 600}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize(("wrong", "param"), COMPLETIONS, ids=lambda value: str(value)[:50])
async def test_completions_refuse(client: httpx.AsyncClient, wrong: dict[str, Any], param: str) -> None:
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **wrong})
    assert_refused(answer, param)


@pytest.mark.parametrize(("wrong", "param"), CHATS, ids=lambda value: str(value)[:50])
async def test_chat_refuses(client: httpx.AsyncClient, wrong: dict[str, Any], param: str) -> None:
    answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **wrong})
    assert_refused(answer, param)


def assert_refused(answer: httpx.Response, param: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0].partition(".")[0] in error["message"]


async def test_a_range_is_said_whole(client: httpx.AsyncClient) -> None:
    for wrong, most in (("truncate_prompt_tokens", 2**31 - 1), ("logprobs", 20)):
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", wrong: 10**20})
        assert f"and {most}, got {10**20}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"model": "tiny", "prompt": "\\ud800"}'])
async def test_a_body_that_is_no_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_required_fields(client: httpx.AsyncClient, missing: str) -> None:
    body = {"model": MODEL, "prompt": "x"}
    del body[missing]
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == missing


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    for path, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": HELLO})):
        answer = await client.post(f"/v1/{path}", json={"model": "nope", **prompt})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "model_not_found",
            "invalid_request_error",
            "model",
        )
    assert (await client.get("/v1/models/nope")).status_code == 404


@pytest.mark.parametrize("wrong", [{"prompt": [5] * 512}, {"prompt": "x", "max_tokens": 512}, {"prompt": [5] * 600}])
async def test_more_than_the_context(client: httpx.AsyncClient, wrong: dict[str, Any]) -> None:
    answer = await client.post("/v1/completions", json={"model": MODEL, **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "512" in answer.json()["error"]["message"]


async def test_a_body_that_is_too_large(model_folder: Path, redis: RedisServer) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 1000

    settings = make_settings(redis, max_body_bytes=4096)
    base = f"http://127.0.0.1:{settings.http_port}"
    async with make_gateway(settings), httpx.AsyncClient(base_url=base) as client:
        for content in (b"x" * 5000, parts()):
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("value", ["0", "-5", "soon", "nan", "1e99"])
async def test_a_timeout_that_is_none(client: httpx.AsyncClient, value: str) -> None:
    for name in ("x-request-timeout-ms", "x-request-timeout"):
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


async def test_a_tenant_that_is_too_long(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "user": "fine"}
    answer = await client.post("/v1/completions", json=body, headers={"x-llm-d-inference-fairness-id": "t" * 300})
    assert_refused(answer, "x-llm-d-inference-fairness-id")


async def test_fields_that_do_no_harm_are_taken(client: httpx.AsyncClient) -> None:
    """Past validation there is no worker: 503. An answer's message may be sent back as it came."""
    answered = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}
    said = [{"role": "developer", "content": "x", "name": "n"}, answered, {"role": "user", "content": "x", "odd": 1}]
    extras = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "tools": None, "tool_choice": "none", "temperature": None,
        "response_format": {"type": "text"}, "seed": -1, "top_k": -1, "stop": ["a", "b"], "logit_bias": {"5": -100},
        "stop_token_ids": [], "ignore_eos": True, "min_tokens": 0, "priority": -3, "cache_salt": "s", "unknown": 1,
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": said, **extras})
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["type"] == "service_unavailable"
    assert error["code"] == "no_workers"


async def test_unknown_paths_and_methods_have_the_same_shape(client: httpx.AsyncClient) -> None:
    answers = [await client.get("/v2/nothing"), await client.get("/v1/completions"), await client.post("/v1/models")]
    assert [answer.status_code for answer in answers] == [404, 405, 405]
    assert all(answer.json()["error"]["message"] for answer in answers)
    assert all(answer.json()["error"]["code"] is None for answer in answers)
    assert all(len(answer.headers["x-request-id"]) == 32 for answer in answers)
    named = await client.get("/v2/nothing", headers={"x-request-id": "mine-2"})
    assert named.headers["x-request-id"] == "mine-2"


async def test_request_ids(client: httpx.AsyncClient) -> None:
    ours = await client.post("/v1/completions", json={}, headers={"x-request-id": "mine-1"})
    assert ours.headers["x-request-id"] == "mine-1"
    minted = await client.post("/v1/completions", json={}, headers={"x-request-id": "with space"})
    assert minted.headers["x-request-id"] not in ("", "with space")


async def test_not_ready_says_what_is_missing(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    answer = await client.get("/health/ready")
    assert answer.status_code == 503
    counts = {"prefill_workers": 0, "decode_workers": 0, "linked_pairs": 0, "sequences": 0, "kv_tokens": 0}
    assert answer.json() == {
        "ready": False, "missing": ["decode: no worker with an open stream"], **counts, "refused_workers": [],
        "registry_reached": True, "models": {MODEL: {"ready": False, **counts}},
    }  # fmt: skip


GRPC: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({}, "prompt"),
    ({"token_ids": llm_pb2.TokenIds(ids=[99999])}, "token_ids"),
    ({"token_ids": llm_pb2.TokenIds()}, "token_ids"),
    ({"messages": llm_pb2.ChatMessages()}, "messages"),
    ({"messages": llm_pb2.ChatMessages(messages=[{"role": "wizard", "content": "x"}])}, "messages[0].role"),
    ({"prompt": "x", "sampling": Sampling(temperature=9)}, "temperature"),
    ({"prompt": "x", "sampling": Sampling(temperature=float("nan"))}, "temperature"),
    ({"prompt": "x", "sampling": Sampling(top_p=-1)}, "top_p"),
    ({"prompt": "x", "sampling": Sampling(max_tokens=0)}, "max_tokens"),
    ({"prompt": "x", "sampling": Sampling(max_tokens=4000)}, "context length"),
    ({"prompt": "x", "sampling": Sampling(logprobs=50)}, "logprobs"),
    ({"prompt": "x", "sampling": Sampling(logit_bias={5: 1000})}, "logit_bias"),
    ({"prompt": "x", "sampling": Sampling(stop=[""])}, "stop"),
    ({"prompt": "x", "priority": 77}, "priority"),
    ({"prompt": "x", "tenant": "t" * 300}, "tenant"),
    ({"prompt": "x", "cache_salt": "s" * 257}, "cache_salt"),
    ({"prompt": "x", "n": 9}, "n"),
    ({"prompt": "x", "sampling": Sampling(allowed_token_ids=[99999])}, "allowed_token_ids"),
    ({"prompt": "x" * 12_000_000}, "context length"),
    ({"messages": llm_pb2.ChatMessages(messages=[{"role": "user", "content": "x" * 12_000_000}])}, "context length"),
]


@pytest.mark.parametrize(("wrong", "field"), GRPC, ids=lambda value: str(value)[:50].replace("\n", " "))
async def test_grpc_refuses(service: Any, wrong: dict[str, Any], field: str) -> None:
    request = llm_pb2.GenerateRequest(model=MODEL, **wrong)
    unary = service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
    for answer in (service.Generate(request).read(), unary):
        with pytest.raises(aio.AioRpcError) as refused:
            await answer
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (refused.value.details() or "")
        assert violated(refused.value)


def violated(error: aio.AioRpcError) -> str:
    """The field that the error's details name."""
    packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    status = status_pb2.Status.FromString(packed)
    assert status.code == error.code().value[0]
    info, found = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert info.domain == "tandem"
    assert status.details[1].Unpack(found)
    assert found.field_violations[0].description == error.details()
    return found.field_violations[0].field


async def test_grpc_names_a_missing_or_unknown_model(service: Any) -> None:
    for model, code in (("", grpc.StatusCode.INVALID_ARGUMENT), ("nope", grpc.StatusCode.NOT_FOUND)):
        request = llm_pb2.GenerateRequest(model=model, prompt="x")
        with pytest.raises(aio.AioRpcError) as refused:
            await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
        assert refused.value.code() is code
        assert "model" in (refused.value.details() or "")


async def test_grpc_without_workers_is_unavailable(service: Any) -> None:
    request = llm_pb2.GenerateRequest(model=MODEL, prompt="x")
    with pytest.raises(aio.AioRpcError) as refused:
        await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not (await service.ListModels(llm_pb2.ListModelsRequest())).models
