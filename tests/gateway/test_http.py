"""Answers over HTTP, from workers that speak the real protocol."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from services.gateway import Gateway
from services.gateway.apis.completions import COMPLETION, read_completion
from services.gateway.door.endpoint import GenerateEndpoint
from services.gateway.generation import Answer, read_sampling
from services.gateway.model import ServedModel
from services.gateway.text import Tokenizer
from services.gateway.tools import FORMATS
from tandem import __version__
from tandem.sampling import SamplingParams
from tandem.v1 import llm_pb2
from tests.gateway.conftest import TEXT, eventually
from tests.gateway.peers import MODEL, Peers

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "seed": 0}
TEXTUAL = {"model": MODEL, "prompt": "once upon", "seed": 0, "max_tokens": 100}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Everything a stream says, which must end in [DONE]."""
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(parts: list[Any], choice: int = 0) -> str:
    said = [c for part in parts for c in part["choices"] if c["index"] == choice]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in said)


async def test_a_whole_completion(http: httpx.AsyncClient, peers: Peers) -> None:
    answer = await http.post("/v1/completions", json=TEXTUAL)
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(peers.decode.seen[0].token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert usage["tandem"][0]["path"] == "remote"
    assert answer.headers["x-tandem-path"] == "remote"
    assert answer.headers["x-tandem-prefill-worker"] == "p"
    assert answer.headers["x-tandem-decode-worker"] == "d"
    assert answer.headers["x-tandem-transfer-bytes"] == "4096"


async def test_speculation_is_asked_for_and_reported(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.generator.num_proposed_tokens, peers.generator.num_accepted_tokens = 7, 5
    for said in ({"method": "draft", "num_tokens": 3}, {"method": "ngram"}, None):
        answer = await http.post("/v1/completions", json={**TEXTUAL, "speculative": said})
        way = answer.json()["usage"]["tandem"][0]
        assert (way["proposed_tokens"], way["accepted_tokens"]) == (7, 5)
    specs = [peers.decode.seen[i] for i in range(3)]
    assert [(s.speculative.method, s.speculative.num_tokens) for s in specs[:2]] == [("draft", 3), ("ngram", 8)]
    assert not specs[2].HasField("speculative")
    exposition = (await http.get("/metrics")).text
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="tiny"} 21.0' in exposition
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="tiny"} 15.0' in exposition


async def test_a_streamed_completion_says_the_same(http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/completions", json=TEXTUAL)).json()
    parts = await events(http, "/v1/completions", {**TEXTUAL, "stream_options": {"include_usage": True}})
    assert len(parts) > 5
    assert text_of(parts) == whole["choices"][0]["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 2) + ["stop"]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({part["id"] for part in parts}) == 1


async def test_chat(http: httpx.AsyncClient, peers: Peers, tokenizer: Tokenizer) -> None:
    whole = (await http.post("/v1/chat/completions", json=CHAT)).json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    parts = await events(http, "/v1/chat/completions", CHAT)
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in part["choices"][0]["delta"] for part in parts[1:])
    assert text_of(parts) == TEXT
    assert tokenizer.decode(peers.decode.seen[0].token_ids) == "<s><user>tell me\n<assistant>"


async def test_text_parts_and_developer_messages(http: httpx.AsyncClient, peers: Peers, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert (await http.post("/v1/chat/completions", json={**CHAT, "messages": messages})).status_code == 200
    expected = "<s><system>be brief\n<user>one\ntwo\n<assistant>"
    assert tokenizer.decode(peers.decode.seen[0].token_ids) == expected


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_choices_of_several_prompts(http: httpx.AsyncClient, peers: Peers, streamed: bool) -> None:
    body = {**TEXTUAL, "prompt": ["one", [5, 6]], "n": 2, "max_tokens": 9, "echo": True, "seed": 3}
    if streamed:
        parts = await events(http, "/v1/completions", body)
        texts = [text_of(parts, i) for i in range(4)]
    else:
        whole = (await http.post("/v1/completions", json=body)).json()
        texts = [choice["text"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["usage"]["completion_tokens"] == 36
        prompts = {tuple(spec.token_ids) for spec in peers.decode.seen}
        assert whole["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    assert sorted(spec.sampling.seed for spec in peers.decode.seen) == [3, 3, 4, 4]
    assert texts[0].startswith("one")
    assert texts[0][3:] == texts[2][2:]
    assert texts[1] != texts[0]


async def test_seeds_are_minted_where_none_is_given(http: httpx.AsyncClient, peers: Peers) -> None:
    for _ in range(2):
        await http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    first, second = (spec.sampling.seed for spec in peers.decode.seen)
    assert first != second


async def test_what_workers_are_asked_for(http: httpx.AsyncClient, peers: Peers) -> None:
    body = {
        **TEXTUAL, "max_tokens": 7, "min_tokens": 2, "top_p": 0.5, "presence_penalty": 1, "logit_bias": {"7": -5},
        "stop_token_ids": [9], "priority": -4, "cache_salt": "s", "seed": -1, "stop": "zzz",
    }  # fmt: skip
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    spec = peers.decode.seen[0]
    expected = llm_pb2.SamplingParams(
        temperature=0.6, top_p=0.5, top_k=20, min_p=0, repetition_penalty=1, presence_penalty=1, frequency_penalty=0,
        logit_bias={7: -5}, max_tokens=7, min_tokens=2, stop_token_ids=[0, 9], seed=2**64 - 1,
        skip_special_tokens=True,
    )  # fmt: skip
    assert SamplingParams.from_proto(spec.sampling) == SamplingParams.from_proto(expected)
    assert (spec.priority, spec.cache_salt) == (-4, "s")
    assert 500_000 < spec.timeout_ms <= 600_000
    assert peers.prefill.seen[0].token_ids == spec.token_ids


async def test_max_tokens_defaults_to_the_room_that_is_left(http: httpx.AsyncClient, peers: Peers) -> None:
    """The workers' 256, not the model's 512."""
    answer = await http.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True})
    left = 256 - len(peers.decode.seen[0].token_ids)
    assert peers.decode.seen[0].sampling.max_tokens == left
    assert list(peers.decode.seen[0].sampling.stop_token_ids) == []
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == left


async def test_a_model_may_say_how_long_an_answer_is_that_nobody_bounds(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        '{"max_new_tokens": 32, "top_p": 0.5, "do_sample": true}', encoding="utf-8"
    )
    model = ServedModel.load(tmp_path, MODEL, 0)
    assert model.defaults == {"max_tokens": 32, "top_p": 0.5}
    assert (await read_sampling({}, model, 320)).max_tokens == 32
    assert (await read_sampling({"max_tokens": 64}, model, 320)).max_tokens == 64
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.0, "temperature": 1.0}', encoding="utf-8")
    greedy = ServedModel.load(tmp_path, MODEL, 0)
    assert [(await read_sampling(said, greedy, 320)).temperature for said in ({}, {"top_p": 1.0})] == [0.0, 1.0]
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 0}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"generation_config\.json: max_new_tokens: "):
        ServedModel.load(tmp_path, MODEL, 0)


@pytest.mark.parametrize(
    ("template", "given", "calls"),
    [
        ("{{ messages }}", "auto", "hermes"), ("[TOOL_CALLS]", "auto", "mistral"), ("{{ messages }}", "none", None),
        ("{{ messages }}", "granite", "granite"),
    ],
)  # fmt: skip
def test_a_model_may_name_how_it_calls_tools(
    template: str, given: str, calls: str | None, model_folder: Path, tmp_path: Path
) -> None:
    """Its template goes before, and what the operator says before both."""
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    said = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "tool_parser": "hermes"}), encoding="utf-8")
    assert ServedModel.load(tmp_path, MODEL, 0, given).calls is FORMATS.get(calls or "")


async def test_a_completion_is_short_unless_more_is_asked_for(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "seed": 0})).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_the_answer_and_frees_the_sequence(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.decode.step_s = 0.005
    answer = await http.post("/v1/completions", json={**TEXTUAL, "stop": ["nothing", " jumps"], "ignore_eos": True})
    choice = answer.json()["choices"][0]
    assert choice["text"] == TEXT.partition(" jumps")[0]
    assert choice["finish_reason"] == "stop"
    await eventually(lambda: [s.request_id for s in peers.decode.seen] == peers.decode.aborted)
    assert not peers.decode.held
    await eventually(lambda: nothing_reserved(peers))


async def test_a_stop_string_in_a_stream_is_never_shown(http: httpx.AsyncClient) -> None:
    parts = await events(http, "/v1/completions", {**TEXTUAL, "stop": "fox 狐狸"})
    assert text_of(parts) == "the quick brown "


async def test_stop_tokens_are_not_shown(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    words = list(await tokenizer.encode(TEXT, add_special_tokens=False))
    for index in (0, 3):
        body = {**TEXTUAL, "stop_token_ids": [words[index]]}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == tokenizer.decode(words[: words.index(words[index])])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == words.index(words[index]) + 1


async def test_an_answer_that_ends_with_its_first_token(http: httpx.AsyncClient, peers: Peers) -> None:
    """The decode worker learns of the end by itself: it is not told to abort, and keeps its blocks as cache."""
    answer = (await http.post("/v1/completions", json={**TEXTUAL, "max_tokens": 1})).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    await eventually(lambda: nothing_reserved(peers))
    assert peers.decode.aborted == []


async def test_an_answer_cut_inside_a_character(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    words = list(await tokenizer.encode(TEXT, add_special_tokens=False))
    cut = len(await tokenizer.encode(TEXT.partition("🦊")[0], add_special_tokens=False)) + 1
    parts = await events(http, "/v1/completions", {**TEXTUAL, "max_tokens": cut})
    assert text_of(parts) == tokenizer.decode(words[:cut])
    assert text_of(parts).endswith("\ufffd")


async def test_chat_logprobs(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["choices"][0]["message"]["content"]
    assert [entry["logprob"] for entry in entries] == [-0.5] * 4
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    parts = await events(http, "/v1/chat/completions", body)
    assert [e for part in parts for e in part["choices"][0]["logprobs"]["content"]] == entries


async def test_completion_logprobs(http: httpx.AsyncClient) -> None:
    body = {**TEXTUAL, "logprobs": 1, "max_tokens": 4}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert [choice["text"][i:].startswith(t) for i, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert list(logprobs["top_logprobs"][0]) == logprobs["tokens"][:1]
    chosen_only = (await http.post("/v1/completions", json={**body, "logprobs": 0})).json()["choices"][0]["logprobs"]
    assert chosen_only["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]


async def test_tokens_sent_twice_are_shown_once(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.decode.repeat_tokens = True
    answer = (await http.post("/v1/completions", json=TEXTUAL)).json()
    assert answer["choices"][0]["text"] == TEXT


async def test_the_official_client(http: httpx.AsyncClient) -> None:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True, seed=0)
        text = "".join([part.choices[0].delta.content or "" async for part in stream])
    assert text == TEXT


async def nothing_reserved(peers: Peers) -> bool:
    return await peers.reserved() == 0


async def test_openapi_describes_what_generation_takes(http: httpx.AsyncClient) -> None:
    """Read by something that knows OpenAPI only: every reference leads somewhere, every field is there."""
    found = (await http.get("/openapi.json")).json()
    for path, fields in {
        "/v1/chat/completions": {"messages", "temperature", "logprob_token_ids", "structured_outputs", "top_logprobs"},
        "/v1/completions": {"prompt", "echo", "prompt_logprobs", "stop"},
        "/v1/responses": {"input", "instructions", "max_output_tokens"},
        "/tokenize": {"messages"},
        "/detokenize": {"tokens"},
        "/v1/load_lora_adapter": {"lora_name", "lora_path"},
        "/v1/unload_lora_adapter": {"lora_name"},
    }.items():
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        described = found["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert fields <= described["properties"].keys()
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(found))) <= found["components"]["schemas"].keys()
    assert found["paths"].keys() >= {"/v1/models", "/ping"}
    assert found["paths"]["/v1/responses/{name}"].keys() == {"get", "delete"}
    (name, order, *_) = found["paths"]["/v1/conversations/{name}/items"]["get"]["parameters"]
    assert (name["in"], order["in"], order["name"]) == ("path", "query", "order")


async def test_the_page_of_docs_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    assert (await http.get("/")).headers["location"] == "docs"
    page = await http.get("/docs")
    assert page.status_code == 200
    linked = re.findall(r"""(?:src|href|url)(?:=|: )["']([^"']+)""", page.text)
    assert len(linked) == 4
    for link in linked:
        assert (await http.get(f"/{link.removeprefix('./')}")).status_code == 200, link
    assert "http" not in page.text.replace("http-equiv", "")


async def test_it_says_which_version_it_is(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": __version__}
    assert (await http.get("/openapi.json")).json()["info"]["version"] == __version__


async def test_a_client_that_reads_slowly_misses_nothing(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers
) -> None:
    """Its tokens gather meanwhile."""
    body = {**TEXTUAL, "ignore_eos": True}
    received: asyncio.Queue[Any] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()})
    sent, reads = [], asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) > 3:
            await reads.wait()

    app = GenerateEndpoint(gateway.directory, read_completion, COMPLETION, lambda: 0.0)
    answering = asyncio.create_task(app({"headers": [], "http_version": "1.1"}, received.get, send))
    await eventually(lambda: len(sent) >= 4 and not peers.decode.held)
    assert len(sent) == 4
    reads.set()
    async with asyncio.timeout(10):
        await answering
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    *parts, done = re.findall(r"data: (.*)\n\n", b"".join(sent).decode())
    assert (text_of([json.loads(part) for part in parts]), done) == (whole["text"], "[DONE]")


async def test_an_answer_is_gone_with_its_request(http: httpx.AsyncClient) -> None:
    """Its memory waits for no search for garbage."""
    gc.collect()
    gc.disable()
    try:
        await events(http, "/v1/completions", TEXTUAL)
        message = {"model": MODEL, "max_tokens": 9, "stream": True, "messages": CHAT["messages"]}
        assert (await http.post("/v1/messages", json=message)).status_code == 200
        await eventually(lambda: not any(type(one) is Answer for one in gc.get_objects()))
    finally:
        gc.enable()
