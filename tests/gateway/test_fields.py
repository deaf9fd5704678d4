"""Every field of a generation request, over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.apis.openai import long_lists, schema
from services.gateway.text import Tokenizer
from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import TEXT
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT, TEXTUAL, events
from tests.gateway.tiny_model import EOS

Sampling = llm_pb2.SamplingParams


@pytest.fixture
async def service(gateway: Gateway) -> AsyncIterator[Any]:
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield llm_pb2_grpc.LLMServiceStub(channel)


async def unary(service: Any, **fields: Any) -> llm_pb2.GenerateUnaryResponse:
    request = llm_pb2.GenerateRequest(**{"model": MODEL, "prompt": "once upon", **fields})
    answer: llm_pb2.GenerateUnaryResponse = await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request))
    return answer


async def completion(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json={**TEXTUAL, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_stop_string_can_be_part_of_the_answer(http: httpx.AsyncClient, service: Any) -> None:
    expected = TEXT.partition(" jumps")[0] + " jumps"
    found = await completion(http, stop=" jumps", include_stop_str_in_output=True)
    assert found["choices"][0]["text"] == expected
    sampling = Sampling(seed=0, stop=[" jumps"], include_stop_str_in_output=True)
    assert (await unary(service, sampling=sampling)).text == expected
    parts = await events(http, "/v1/completions", {**TEXTUAL, "stop": " jumps", "include_stop_str_in_output": True})
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


async def test_special_tokens_can_be_shown(http: httpx.AsyncClient, service: Any) -> None:
    """The end-of-text token here does not end the answer, so it is not left out as its end."""
    asked = {"ignore_eos": True, "max_tokens": 60}
    assert EOS not in (await completion(http, **asked))["choices"][0]["text"]
    first_end = await completion(http, skip_special_tokens=False, include_stop_str_in_output=True)
    assert first_end["choices"][0]["text"] == TEXT + EOS
    sampling = Sampling(seed=0, skip_special_tokens=False, include_stop_str_in_output=True)
    assert (await unary(service, sampling=sampling)).text == TEXT + EOS


async def test_what_workers_are_told_of_tokens(
    http: httpx.AsyncClient, service: Any, peers: Peers, tokenizer: Tokenizer
) -> None:
    await completion(http, allowed_token_ids=[9, 5], bad_words=["fox"])
    await unary(service, sampling=Sampling(seed=0, allowed_token_ids=[5, 9], bad_words=["fox"]))
    inside = list(await tokenizer.encode(" fox", add_special_tokens=False))
    first = list(await tokenizer.encode("fox", add_special_tokens=False))
    for spec in peers.decode.seen:
        assert list(spec.sampling.allowed_token_ids) == [5, 9]
        assert not spec.sampling.bad_words
        assert sorted(list(one.ids) for one in spec.sampling.bad_words_token_ids) == sorted([first, inside])


async def test_the_least_top_p_is_the_likeliest_token(http: httpx.AsyncClient, service: Any, peers: Peers) -> None:
    await completion(http, top_p=0, temperature=1.5)
    await unary(service, sampling=Sampling(seed=0, top_p=0, temperature=1.5))
    said = {"model": MODEL, "top_p": 0, "temperature": 1}
    for path, more in (
        ("chat/completions", CHAT),
        ("responses", {"input": "x"}),
        ("messages", {**CHAT, "max_tokens": 9}),
    ):
        assert (await http.post(f"/v1/{path}", json={**more, **said})).status_code == 200
    assert [spec.sampling.temperature for spec in peers.decode.seen] == [0.0] * 5


async def test_a_long_prompt_can_be_cut(http: httpx.AsyncClient, service: Any, peers: Peers) -> None:
    prompt = [*range(3, 40)]
    await completion(http, prompt=prompt, truncate_prompt_tokens=5)
    await unary(service, token_ids=llm_pb2.TokenIds(ids=prompt), truncate_prompt_tokens=5)
    await http.post("/v1/chat/completions", json={**CHAT, "truncate_prompt_tokens": 5})
    assert [list(spec.token_ids) for spec in peers.decode.seen[:2]] == [prompt[-5:]] * 2
    assert len(peers.decode.seen[2].token_ids) == 5


async def test_token_ids_are_returned(http: httpx.AsyncClient, peers: Peers, tokenizer: Tokenizer) -> None:
    for path, body in (("/v1/completions", TEXTUAL), ("/v1/chat/completions", CHAT)):
        whole = (await http.post(path, json={**body, "return_token_ids": True})).json()["choices"][0]
        assert tokenizer.decode(whole["token_ids"]) == TEXT
        assert whole["prompt_token_ids"] == list(peers.decode.seen[-1].token_ids)
        parts = await events(http, path, {**body, "return_token_ids": True})
        assert [i for part in parts for i in part["choices"][0]["token_ids"]] == whole["token_ids"]
        assert parts[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert "token_ids" not in (await http.post(path, json=body)).json()["choices"][0]


async def test_tokens_can_be_named_by_their_ids(http: httpx.AsyncClient) -> None:
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True, "logprobs": 2}
    choice = (await completion(http, **body))["choices"][0]
    named = [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == named
    assert next(iter(choice["logprobs"]["top_logprobs"][0])) == named[0]
    asked = {**CHAT, **body, "logprobs": True, "top_logprobs": 2}
    entries = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == named[:-1]  # all but the end of the text
    assert entries[0]["top_logprobs"][0]["token"] == named[0]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode().startswith(TEXT)


async def test_usage_with_every_chunk(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = await events(http, "/v1/completions", {**TEXTUAL, "stream_options": options})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == counts[-2]
    assert len({part["usage"]["prompt_tokens"] for part in parts}) == 1


async def test_the_last_message_can_be_continued(
    http: httpx.AsyncClient, service: Any, peers: Peers, tokenizer: Tokenizer
) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    await http.post("/v1/chat/completions", json={**CHAT, "messages": said, "continue_final_message": True})
    messages: Any = llm_pb2.ChatMessages(messages=said, continue_final_message=True)
    await unary(service, messages=messages)
    assert [tokenizer.decode(spec.token_ids) for spec in peers.decode.seen] == ["<s><user>hi\n<assistant>well, "] * 2


async def test_the_answer_need_not_be_opened(
    http: httpx.AsyncClient, service: Any, peers: Peers, tokenizer: Tokenizer
) -> None:
    await http.post("/v1/chat/completions", json={**CHAT, "add_generation_prompt": False})
    said: Any = [{"role": "user", "content": "tell me"}]
    await unary(service, messages=llm_pb2.ChatMessages(messages=said, add_generation_prompt=False))
    assert [tokenizer.decode(spec.token_ids) for spec in peers.decode.seen] == ["<s><user>tell me\n"] * 2


async def test_variables_for_the_template(
    http: httpx.AsyncClient, service: Any, peers: Peers, tokenizer: Tokenizer
) -> None:
    kwargs = {"tone": "calm", "messages": "not these"}
    await http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": kwargs, "reasoning_effort": "low"})
    said = llm_pb2.ChatMessages(messages=[{"role": "user", "content": "tell me"}])  # type: ignore[list-item]
    said.chat_template_kwargs.update({"tone": "calm", "reasoning_effort": "low"})
    await unary(service, messages=said)
    expected = "<s>(calm low)<user>tell me\n<assistant>"
    assert [tokenizer.decode(spec.token_ids) for spec in peers.decode.seen] == [expected] * 2


async def test_several_answers_over_grpc(service: Any, http: httpx.AsyncClient) -> None:
    texts = [choice["text"] for choice in (await completion(http, n=3, seed=2))["choices"]]
    whole = await unary(service, n=3, sampling=Sampling(seed=2, max_tokens=100))
    assert [choice.text for choice in whole.choices] == texts
    assert (whole.text, list(whole.token_ids)) == (texts[0], list(whole.choices[0].token_ids))
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    request = llm_pb2.GenerateRequest(model=MODEL, prompt="once upon", n=3, sampling=Sampling(seed=2, max_tokens=100))
    streamed = ["", "", ""]
    async for message in service.Generate(request):
        streamed[message.index] += message.text
    assert streamed == texts


async def test_an_echo_has_the_prompts_logprobs(http: httpx.AsyncClient) -> None:
    """As lm-eval asks for them, and for scoring alone."""
    ids = [40, 41, 42, 300]
    asked = {"prompt": ids, "echo": True, "logprobs": 1}
    choice = (await completion(http, **asked, max_tokens=1))["choices"][0]
    assert "prompt_logprobs" not in choice
    found = choice["logprobs"]
    assert found["token_logprobs"] == [None, -10.25, -10.5, -75.0, -0.5]
    assert found["top_logprobs"][0] is None
    assert set(found["top_logprobs"][1].values()) == {-0.125, -10.25}
    assert len(found["tokens"]) == len(found["text_offset"]) == 5
    echoed = len(choice["text"]) - len(found["tokens"][4])
    assert found["text_offset"] == [0, *(len("".join(found["tokens"][:i])) for i in range(1, 4)), echoed]

    whole = await completion(http, **asked, max_tokens=0)
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [None, -10.25, -10.5, -75.0]
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 0)
    parts = [p["choices"][0] for p in await events(http, "/v1/completions", {**TEXTUAL, **asked, "max_tokens": 3})]
    streamed = [logprob for part in parts if part["logprobs"] for logprob in part["logprobs"]["token_logprobs"]]
    assert streamed == [None, -10.25, -10.5, -75.0, *[-0.5] * 3]
    assert (await completion(http, prompt=ids, echo=True, max_tokens=0))["choices"][0]["logprobs"] is None


async def test_logprobs_of_the_prompt(http: httpx.AsyncClient, service: Any) -> None:
    second = {"logprob": -10.25, "rank": 3, "decoded_token": "I"}
    likeliest = {"logprob": -0.125, "rank": 1, "decoded_token": "!"}
    plain = (await completion(http, prompt=[40, 41], prompt_logprobs=1))["choices"][0]
    assert plain["prompt_logprobs"] == [None, {"41": second, "1": likeliest}]
    alone = (await completion(http, prompt=[40], prompt_logprobs=1))["choices"][0]
    assert alone["prompt_logprobs"] == [None]
    chat = await http.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 0, "max_tokens": 0})
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]
    assert chat.json()["choices"][0]["message"]["content"] == ""
    answer = await unary(service, prompt="once upon", sampling=Sampling(prompt_logprobs=1, max_tokens=0))
    assert [one.rank for one in answer.choices[0].prompt_logprobs] == [3] * (answer.usage.prompt_tokens - 1)
    assert not answer.token_ids


def choice_of(parts: list[Any]) -> Any:
    return reduce(in_one, [choice for part in parts for choice in part["choices"]])


def in_one(part: Any, following: Any) -> Any:
    """Two parts of a stream as one: how many tokens come in one event depends on the machine."""
    if isinstance(part, dict) and isinstance(following, dict):
        return {key: in_one(part.get(key), following.get(key)) for key in part | following}
    if isinstance(part, str | list) and isinstance(following, type(part)):
        return part + following
    return part if following is None else following


async def test_long_lists_are_those_that_short_ones_are(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "prompt": list(range(40, 60)),
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "max_tokens": 5,
        "seed": 1,
    }
    chat = {**CHAT, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "max_tokens": 9, "seed": 1}

    async def said() -> list[Any]:
        whole = [await completion(http, **asked), (await http.post("/v1/chat/completions", json=chat)).json()]
        text = {**TEXTUAL, **asked, "stream": True}
        streams = [await events(http, "/v1/completions", text), await events(http, "/v1/chat/completions", chat)]
        answers = [*whole, *({**parts[0], "choices": choice_of(parts)} for parts in streams)]
        return [(answer["choices"], answer.get("prompt_logprobs")) for answer in answers]

    at_once = await said()
    monkeypatch.setattr(long_lists, "PORTION", 3)
    assert await said() == at_once


async def test_named_tokens_are_sent_to_workers(http: httpx.AsyncClient, service: Any, peers: Peers) -> None:
    await completion(http, logprob_token_ids=[7, 5])
    await unary(service, sampling=Sampling(logprob_token_ids=[7, 5]))
    for spec in [*peers.decode.seen, *peers.prefill.seen][-2:]:
        assert list(spec.sampling.logprob_token_ids) == [7, 5]
        assert spec.sampling.HasField("logprobs")


async def test_a_prompt_of_several_answers_is_prefilled_once(http: httpx.AsyncClient, peers: Peers) -> None:
    """The others go to the worker that holds it, once its KV is there."""
    ids = list(range(40, 110))
    found = await completion(http, prompt=ids, n=3, max_tokens=3, prompt_logprobs=0, echo=True, logprobs=0)
    assert len(peers.prefill.seen) == 1
    assert len(peers.decode.seen) == 3
    assert [bool(sender) for sender in peers.decode.senders] == [True, False, False]
    assert [spec.sampling.HasField("prompt_logprobs") for spec in peers.decode.seen] == [True, False, False]
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in found["choices"]]
    assert logprobs[0] == logprobs[1] == logprobs[2]
    assert len(logprobs[0]) == 73
    paths = found["usage"]["tandem"]
    assert [path["path"] for path in paths] == ["remote", "local", "local"]
    assert "shares" in paths[2]["reason"]
    assert found["usage"]["prompt_tokens"] == 70


def test_the_documents_name_every_field() -> None:
    said = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    taken, _, refused = said.partition("Refused with 400")
    bodies = schema.with_sampling(schema.ChatBody), schema.with_sampling(schema.CompletionBody)
    fields = {name for body in bodies for name in body.model_fields}
    assert not {name for name in fields if f"`{name}`" not in taken}
    assert not {name for name in schema.AS_IS if f"`{name}`" not in refused}
