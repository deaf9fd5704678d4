"""Numbers of any length are the client's fault, by the field's name, also where a full queue makes others wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.apis import responses
from services.gateway.apis.messages import schema as messages_schema
from services.gateway.apis.openai import schema
from services.gateway.apis.openai.schema import Body, GenerationBody, with_sampling
from tests.gateway.conftest import with_settings
from tests.gateway.full_queue import SMALL, full
from tests.gateway.peers import MODEL

HUGE = ("9" * 400, "-" + "9" * 400, "1e999", "-1e999", "NaN", "Infinity", "9" * 20_000)
MESSAGES: Any = {"messages": [{"role": "user", "content": "x"}]}
# Paths, what is asked for, and fields that take numbers.
SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "n", "prompt_logprobs", "thinking_token_budget", "priority", "truncate_prompt_tokens",
)  # fmt: skip
DOORS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "/v1/completions": ({"prompt": "x"}, (*SAMPLING, "logprobs", "best_of")),
    "/v1/chat/completions": (MESSAGES, (*SAMPLING, "top_logprobs", "max_completion_tokens")),
    "/v1/responses": ({"input": "x"}, ("max_output_tokens", "temperature", "top_p", "top_logprobs", "max_tool_calls")),
    "/v1/messages": ({**MESSAGES, "max_tokens": 5}, ("max_tokens", "temperature", "top_p", "top_k", "seed")),
    "/v1/embeddings": ({"input": "x"}, ("dimensions", "truncate_prompt_tokens", "priority")),
    "/v1/rerank": ({"query": "x", "documents": ["x"]}, ("top_n", "truncate_prompt_tokens")),
    "/v1/score": ({"text_1": "x", "text_2": "x"}, ("truncate_prompt_tokens", "priority")),
}
# Places within a field, and what a complaint names.
WITHIN = {
    "stop_token_ids": "[%s]", "allowed_token_ids": "[%s]", "logprob_token_ids": "[%s]", "logit_bias": '{"5":%s}',
    "speculative": '{"method":"ngram","num_tokens":%s}', "prompt": "[5,%s]",
}  # fmt: skip


def bodies() -> Iterator[tuple[str, str, str]]:
    """Yields paths, the names of fields, and bodies that have a number there that is none of theirs."""
    for path, (asked, fields) in DOORS.items():
        for field in fields:
            beside = json.dumps({"model": MODEL, **asked} | {field: "HERE"})
            yield from ((path, field, beside.replace('"HERE"', huge)) for huge in HUGE)
    for field, form in WITHIN.items():
        said = {"prompt": '"x"'} | {field: form % HUGE[0]}
        inner = ",".join(f'"{name}":{value}' for name, value in said.items())
        yield "/v1/completions", field, f'{{"model":"{MODEL}",{inner}}}'
    huge = HUGE[0]
    yield "/v1/completions", "logit_bias", f'{{"model":"{MODEL}","prompt":"x","logit_bias":{{"{huge}":1}}}}'
    thinking = f'"thinking":{{"type":"enabled","budget_tokens":{huge}}}'
    yield (
        "/v1/messages",
        "thinking.budget_tokens",
        (f'{{"model":"{MODEL}","max_tokens":5,"messages":[{{"role":"user","content":"x"}}],{thinking}}}'),
    )
    yield "/detokenize", "tokens", f'{{"model":"{MODEL}","tokens":[{huge}]}}'


async def check_each(http: httpx.AsyncClient) -> None:
    for path, field, body in bodies():
        answer = await http.post(path, content=body, headers={"x-request-timeout-ms": "30000"})
        assert answer.status_code == 400, (path, field, body[:100], answer.text)
        error = answer.json()["error"]
        named = error["message"] if path == "/v1/messages" else str(error["param"])
        is_no_json = "not valid JSON" in error["message"] and ("NaN" in body or len(body) > 20_000)
        assert is_no_json or (named and named.replace("max_tokens", field).startswith(field)), (
            path,
            field,
            answer.text,
        )


async def test_of_bodies(http: httpx.AsyncClient) -> None:
    await check_each(http)


@with_settings(**SMALL)
async def test_of_bodies_while_others_wait(gateway: Gateway, http: httpx.AsyncClient) -> None:
    async with full(gateway):
        await check_each(http)


@pytest.mark.parametrize("said", ["nan", "inf", "-inf", "1e999", "9" * 400, "9" * 5000, "-1", "0", "x"])
async def test_of_headers(http: httpx.AsyncClient, said: str) -> None:
    for name in ("x-request-timeout-ms", "x-request-timeout", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"):
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={name: said})
        assert answer.status_code in ((400, 200) if name == "x-request-timeout" else (400,)), (name, answer.text)


def subclasses(kind: type[Body]) -> list[type[Body]]:
    return [kind, *(other for one in kind.__subclasses__() for other in subclasses(one))]


def unbounded(part: Any, path: str = "") -> list[str]:
    """Places in a core schema where an integer of any length is taken."""
    if isinstance(part, dict):
        if part.get("type") == "int":
            high, low = part.get("le", part.get("lt")), part.get("ge", part.get("gt"))
            return [] if high is not None and high <= 2**127 and low is not None and low >= -(2**127) else [path]
        return [place for name, inner in part.items() for place in unbounded(inner, f"{path}.{name}")]
    return [place for inner in part for place in unbounded(inner, path)] if isinstance(part, list | tuple) else []


def test_every_integer_of_a_body_is_bounded() -> None:
    assert {responses.__name__, messages_schema.__name__, schema.__name__}  # which define them
    found = {}
    for kind in subclasses(Body):
        full_kind = with_sampling(kind) if issubclass(kind, GenerationBody) else kind
        full_kind.model_rebuild(force=True)
        found[kind.__name__] = unbounded(full_kind.__pydantic_core_schema__)
    assert {name: places for name, places in found.items() if places} == {}
    assert len(found) > 15


async def test_bounds_that_no_program_could_read_are_not_described(http: httpx.AsyncClient) -> None:
    assert str(2**127) not in (await http.get("/openapi.json")).text
