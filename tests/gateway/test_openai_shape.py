"""The shapes that clients of OpenAI's API rely on, beyond the text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.directory import readiness
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT, TEXTUAL, events, text_of


async def test_usage_is_null_until_the_last_chunk(http: httpx.AsyncClient) -> None:
    for path, body in (("/v1/completions", TEXTUAL), ("/v1/chat/completions", CHAT)):
        *parts, last = await events(http, path, {**body, "stream_options": {"include_usage": True}})
        assert [part["usage"] for part in parts] == [None] * len(parts)
        assert last["usage"]["total_tokens"] > 0
        assert not any("usage" in part for part in await events(http, path, body))


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"service_tier": "flex"}], ids=str)
async def test_an_event_says_the_same_whether_or_not_its_frame_was_kept(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    """Events with token ids are put together anew each time."""

    def shape(part: Any) -> str:
        rest = {name: value for name, value in part.items() if name not in ("id", "created", "choices")}
        choices = [{**choice, "text": "", "token_ids": None, "prompt_token_ids": None} for choice in part["choices"]]
        for choice in choices:
            if "delta" in choice:
                choice["delta"] = {**choice["delta"], "content": ""}
        return json.dumps([rest, choices], sort_keys=True)

    for path, body in (("/v1/completions", TEXTUAL), ("/v1/chat/completions", CHAT)):
        asked = {**body, **more, "n": 2}
        kept = await events(http, path, asked)
        anew = await events(http, path, {**asked, "return_token_ids": True})
        for choice in (0, 1):
            own, others = (
                [p for p in parts if p["choices"] and p["choices"][0]["index"] == choice] for parts in (kept, anew)
            )
            assert len(own) > 3
            assert text_of(own, choice) == text_of(others, choice)
            assert list(dict.fromkeys(map(shape, own))) == list(dict.fromkeys(map(shape, others)))


async def test_the_chunk_with_the_finish_reason_says_nothing_else(http: httpx.AsyncClient) -> None:
    parts = await events(http, "/v1/chat/completions", CHAT)
    first, *_, last = (part["choices"][0] for part in parts)
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert first["delta"]["role"] == "assistant"
    assert isinstance(first["delta"]["content"], str)


async def test_special_tokens_are_added_as_a_body_may_ask_for(http: httpx.AsyncClient, peers: Peers) -> None:
    """By a chat's template, and else by the tokenizer."""
    for path, body, happens in (("/v1/chat/completions", CHAT, False), ("/v1/completions", TEXTUAL, True)):
        for more in ({}, {"add_special_tokens": happens}):
            assert (await http.post(path, json=body | more)).status_code == 200
        plain, asked = peers.decode.seen[-2:]
        assert plain.token_ids == asked.token_ids
        refused = await http.post(path, json={**body, "add_special_tokens": not happens})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")


async def test_logprobs_have_a_refusal(http: httpx.AsyncClient) -> None:
    choice = (await http.post("/v1/chat/completions", json={**CHAT, "logprobs": True})).json()["choices"][0]
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize(
    ("tier", "served"), [("auto", "default"), ("default", "default"), ("flex", "flex"), ("vip", "default")]
)
async def test_the_service_tier_is_named(http: httpx.AsyncClient, tier: str, served: str) -> None:
    answer = (await http.post("/v1/completions", json={**TEXTUAL, "service_tier": tier})).json()
    assert answer["service_tier"] == served
    parts = await events(http, "/v1/chat/completions", {**CHAT, "service_tier": tier})
    assert {part["service_tier"] for part in parts} == {served}
    assert "service_tier" not in (await http.post("/v1/completions", json=TEXTUAL)).json()


async def test_the_best_of_several(http: httpx.AsyncClient, peers: Peers) -> None:
    """The peers' answers differ by their seed; how likely one is, by how early its text begins."""
    peers.decode.generator.logprob = lambda spec: -float(spec.sampling.seed)
    body = {**TEXTUAL, "prompt": ["one", "two"], "n": 2, "best_of": 4, "seed": 3, "max_tokens": 5}
    best = (await http.post("/v1/completions", json=body)).json()
    every = (await http.post("/v1/completions", json={**body, "n": 4, "best_of": None})).json()
    texts = [choice["text"] for choice in every["choices"]]
    assert [choice["text"] for choice in best["choices"]] == [texts[0], texts[1], texts[4], texts[5]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 40


async def test_a_bug_does_not_tell_clients_how_it_came_about(
    http: httpx.AsyncClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("secret detail")

    monkeypatch.setattr(type(gateway.directory.llm_of(None)), "answer", broken)
    answer = await http.post("/v1/completions", json=TEXTUAL, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error; the gateway's log tells more of request mine"
    monkeypatch.setattr(readiness, "of_model", broken)
    answer = await http.get("/health/ready", headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "mine"


async def test_many_at_once_keep_apart(http: httpx.AsyncClient) -> None:
    bodies = [{"model": MODEL, "prompt": "x", "seed": seed, "max_tokens": 9} for seed in range(7)]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 7
