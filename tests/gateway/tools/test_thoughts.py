"""How long a model may think: what is passed on to workers, over HTTP and gRPC."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from grpc import aio

from services.gateway import Gateway
from services.gateway.text import Tokenizer
from services.gateway.untrusted import ChatTemplate
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.peers import MODEL
from tests.gateway.tiny_model import EOS
from tests.gateway.tools.test_calls import TEMPLATE, says

__all__ = ["says"]
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
OPENED = {"chat_template_kwargs": {"think": True}}


async def ask(http: httpx.AsyncClient, **fields: Any) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("opened", [False, True])
async def test_a_budget_and_the_marks_go_to_workers(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer, opened: bool
) -> None:
    seen = says("ok")
    await ask(http, thinking_token_budget=7, **(OPENED if opened else {}))
    asked = llm_pb2.GenerateRequest(
        model=MODEL, messages=llm_pb2.ChatMessages(messages=CHAT["messages"]),
        sampling=llm_pb2.SamplingParams(thinking_token_budget=7),
    )  # fmt: skip
    asked.messages.chat_template_kwargs["think"] = opened
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        await llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked))
    begin, end = tokenizer.token_ids("<think>"), tokenizer.token_ids("</think>")
    assert len({spec.request_id for spec in seen}) == 2
    for spec in seen:
        assert spec.sampling.thinking_token_budget == 7
        assert tuple(spec.sampling.thinking_begin_token_ids) == (() if opened else begin)
        assert tuple(spec.sampling.thinking_end_token_ids) == end


async def test_a_prompt_of_text_may_end_within_thoughts(http: httpx.AsyncClient, says: Any) -> None:
    for prompt, opened in (("<think>", True), ("a = <think>so", True), ("<think>a</think>b", False), ("b", False)):
        seen = says("ok")
        body = {"model": MODEL, "prompt": prompt, "thinking_token_budget": 1}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (not seen[0].sampling.thinking_begin_token_ids) is opened


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "max"}, None),
        ({"reasoning_effort": "much"}, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 3}, 3),
        ({"thinking_token_budget": -1}, None),
    ],
)
async def test_an_effort_is_a_budget(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, fields: dict[str, Any], budget: int | None
) -> None:
    seen = says("ok")
    await ask(http, **fields)
    sampling = seen[0].sampling
    assert (sampling.thinking_token_budget if sampling.HasField("thinking_token_budget") else None) == budget
    assert bool(sampling.thinking_end_token_ids) is (budget is not None)
    object.__setattr__(
        gateway.directory.llm_of(None).model,
        "chat_template",
        ChatTemplate(TEMPLATE + "{{ reasoning_effort }}{{ enable_thinking }}", {}),
    )
    if set(fields) == {"reasoning_effort"}:
        seen = says("ok")
        await ask(http, **fields)
        assert not seen[0].sampling.HasField("thinking_token_budget")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": "7"}, "thinking_token_budget"),
    ],
)
async def test_what_is_no_budget_is_refused(
    http: httpx.AsyncClient, says: Any, fields: dict[str, Any], param: str
) -> None:
    says("ok")
    answer = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_model_without_thoughts_has_no_budget_for_them(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, "thinking_token_budget": 7})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
    await ask(http, reasoning_effort="low")


def test_a_mark_may_be_a_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.mark(EOS) == tokenizer.token_ids(EOS)[0]
    assert tokenizer.mark("</think>") == "</think>"
