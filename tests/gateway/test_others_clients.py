"""Clients of other servers, what they send and expect: names, encodings, fields, routes."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.door.encodings import decompressed
from services.gateway.errors import BodyTooLarge, InvalidRequest
from services.gateway.text import Tokenizer
from tests.gateway.conftest import TEXT, with_settings
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT, TEXTUAL, events

PATHS = (("/v1/completions", TEXTUAL), ("/v1/chat/completions", CHAT))
BOMB = gzip.compress(bytes(64 * 2**20))


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_the_stop_reason_is_named(
    http: httpx.AsyncClient, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    word = TEXT.split()[2]
    token = tokenizer.token_ids(TEXT)[3]
    for more, reason in (({}, None), ({"stop": ["nowhere", word]}, word), ({"stop_token_ids": [token]}, token)):
        (choice,) = (await post(http, path, {**body, **more}))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        *parts, last = [part["choices"][0] for part in await events(http, path, {**body, **more})]
        assert last["stop_reason"] == reason
        assert not any("stop_reason" in part for part in parts)
    assert (await post(http, path, {**body, "max_tokens": 2}))["choices"][0]["stop_reason"] is None


async def test_logprobs_of_a_chat_are_of_what_is_shown(http: httpx.AsyncClient) -> None:
    asked = {**CHAT, "logprobs": True}
    whole = await post(http, "/v1/chat/completions", asked)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT
    assert len(entries) == whole["usage"]["completion_tokens"] - 1
    parts = await events(http, "/v1/chat/completions", asked)
    said = [part["choices"][0]["logprobs"] for part in parts]
    assert [entry for one in said if one for entry in one["content"]] == entries
    shown = await post(http, "/v1/chat/completions", {**asked, "include_stop_str_in_output": True})
    assert len(shown["choices"][0]["logprobs"]["content"]) == shown["usage"]["completion_tokens"]


async def test_a_refusal_goes_back_into_the_prompt(http: httpx.AsyncClient, peers: Peers, tokenizer: Tokenizer) -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    for said in ({"content": [part]}, {"content": None, "refusal": "I will not."}):
        messages = [*CHAT["messages"], {"role": "assistant", **said}, *CHAT["messages"]]  # type: ignore[misc]
        await post(http, "/v1/chat/completions", {**CHAT, "messages": messages})
        prompt = tokenizer.decode(peers.decode.seen[-1].token_ids, skip_special_tokens=False)
        assert "I will not." in prompt
    wrong = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
    answer = await http.post("/v1/chat/completions", json=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0].type")


async def test_a_body_may_be_compressed(http: httpx.AsyncClient) -> None:
    for path, body in (*PATHS, ("/tokenize", {"prompt": "a b"})):
        said = json.dumps(body).encode()
        for data in (gzip.compress(said), gzip.compress(said[:9]) + gzip.compress(said[9:])):
            answer = await http.post(path, content=data, headers={"content-encoding": "gzip"})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("encoding", "data", "status", "code"),
    [
        ("br", b"{}", 415, "unsupported_encoding"),
        ("gzip, gzip", b"{}", 415, "unsupported_encoding"),
        ("gzip", b"{}", 400, "invalid_encoding"),
        ("gzip", gzip.compress(b"{}")[:-3], 400, "invalid_encoding"),
        ("gzip", gzip.compress(b"{}") + b"more", 400, "invalid_encoding"),
        ("gzip", gzip.compress(b"") * 500_000, 400, "invalid_encoding"),
        ("gzip", BOMB, 413, "body_too_large"),
    ],
    ids=["brotli", "twice", "plain", "cut off", "followed", "members", "bomb"],
)
async def test_other_encodings_are_refused(
    http: httpx.AsyncClient, encoding: str, data: bytes, status: int, code: str
) -> None:
    for path, _ in PATHS:
        answer = await http.post(path, content=data, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert ("accept-encoding" in answer.headers) is (status == 415)


def test_a_bomb_is_never_unpacked() -> None:
    for data in (BOMB, b"".join(gzip.compress(b"x" * 100) for _ in range(1000))):
        tracemalloc.start()
        with pytest.raises((BodyTooLarge, InvalidRequest)):
            decompressed(data, 10_000)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


@with_settings(aliases={"gpt-x": {MODEL: 1}, "org/gpt": {MODEL: 1}})
async def test_a_model_may_have_several_names(http: httpx.AsyncClient, gateway: Gateway) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in listed] == [(MODEL, MODEL), ("gpt-x", MODEL), ("org/gpt", MODEL)]
    for name in (MODEL, "gpt-x", "org/gpt"):
        assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        for path, body in PATHS:
            asked = {**body, "model": name}
            whole = await post(http, path, asked)
            assert whole["model"] == name
            assert {part["model"] for part in await events(http, path, asked)} == {name}
    assert (await http.get("/v1/models/other")).status_code == 404
    with pytest.raises(InvalidRequest, match="no name for an adapter"):
        await gateway.directory.load_adapter("gpt-x", "/nowhere", None)


async def test_it_says_that_it_lives_and_what_it_has_to_do(http: httpx.AsyncClient) -> None:
    assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200
    assert (await http.get("/load")).json() == {"server_load": 0}
    async with http.stream("POST", "/v1/completions", json={**TEXTUAL, "stream": True, "ignore_eos": True}) as answer:
        await anext(answer.aiter_lines())
        assert (await http.get("/load")).json() == {"server_load": 1}
