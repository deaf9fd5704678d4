"""Structured output on a real cluster: the first token by prefill, the others by decode, as one engine has them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tandem import grammar
from tandem.engine import Engine, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import RunningCluster
from tests.e2e.test_exact import oracle, prompt_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_valid_and_exact(
    request: pytest.FixtureRequest, one_process_engine: Engine, transport: str, temperature: float
) -> None:
    cluster: RunningCluster = request.getfixturevalue(f"{transport}_cluster")
    prompt = prompt_of(40, 1)
    sampling = llm_pb2.SamplingParams(
        max_tokens=60, temperature=temperature, seed=5, repetition_penalty=1.0, top_p=1.0, top_k=0
    )
    asked = llm_pb2.GenerateRequest(
        model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling,
        structured_outputs=llm_pb2.StructuredOutputs(json=json.dumps(SCHEMA)),
    )  # fmt: skip
    with grpc.insecure_channel(cluster.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        answer = service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked), timeout=60)
    assert answer.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
    assert answer.finish_reason == llm_pb2.FINISH_REASON_STOP
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    alone = SamplingParams(
        60, temperature=temperature, seed=5, stop_token_ids=frozenset({0}), grammar=grammar.of_json_schema(SCHEMA)
    )
    assert list(answer.token_ids) == oracle(one_process_engine, prompt, alone)[0]


TOOLS = [
    {"type": "function", "function": {"name": "store", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "clear"}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "store"}}])
def test_forced_calls_are_valid(shm_cluster: RunningCluster, choice: Any) -> None:
    """The demo model knows of no tools: the grammar does."""
    messages = [{"role": "user", "content": "a thing"}]
    with OpenAI(base_url=f"{shm_cluster.http}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tandem-demo", "messages": messages, "tools": TOOLS, "tool_choice": choice, "seed": 3}
        asked |= {"temperature": 0, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**asked).choices[0]
        (call,) = whole.message.tool_calls or []
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "store" else {})
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        # What comes while a busy machine lets the gateway sleep is one piece: not of every stream is it all.
        said, streams = call.function, (client.chat.completions.create(**asked, stream=True) for _ in range(10))
        assert any(in_pieces(stream, said.name, said.arguments) for stream in streams) or said.name == "clear"


def in_pieces(stream: Iterable[ChatCompletionChunk], name: str, arguments: str) -> bool:
    """True if the arguments came in several. They and the name are as expected."""
    parts = [part.choices[0] for part in stream]
    first, *others = [piece.function for part in parts for piece in part.delta.tool_calls or [] if piece.function]
    streamed = "".join(piece.arguments or "" for piece in (first, *others))
    assert (first.name, streamed) == (name, arguments)
    assert parts[-1].finish_reason == "tool_calls"
    return len(others) > 1


def test_over_http(shm_cluster: RunningCluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    body = {"model": "tandem-demo", "messages": [{"role": "user", "content": "a thing"}], "response_format": form}
    answer = httpx.post(f"{shm_cluster.http}/v1/chat/completions", json=body, timeout=60).json()
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
