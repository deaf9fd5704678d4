"""Tokenizing a text without an answer, and what the caches are said to hold."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.gateway.admission import TextTurns, Weights
from services.gateway.admission.priority import PriorityClass
from services.gateway.text import Tokenizer
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT, TEXTUAL


async def test_a_text_and_back(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "the quick é 狐狸"
    found = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert found["tokens"] == list(await tokenizer.encode(text, add_special_tokens=True))
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 256)
    assert found["token_strs"][0] == "the"
    back = await http.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]})
    assert back.json() == {"prompt": text}


async def test_messages_become_the_prompt_that_workers_get(http: httpx.AsyncClient, peers: Peers) -> None:
    found = (await http.post("/tokenize", json={"model": MODEL, "messages": CHAT["messages"]})).json()
    await http.post("/v1/chat/completions", json=CHAT)
    assert found["tokens"] == list(peers.decode.seen[0].token_ids)
    assert found["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "x" * 12_000_000}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5], "model": "nope"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, path: str, body: dict[str, object], param: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


async def test_metrics_of_caches(http: httpx.AsyncClient, peers: Peers) -> None:
    usage = (await http.post("/v1/completions", json=TEXTUAL)).json()["usage"]
    lines = (await http.get("/metrics")).text.splitlines()
    label = f'{{model_name="{MODEL}"}}'
    assert f"vllm:prefix_cache_queries_total{label} {float(usage['prompt_tokens'])}" in lines
    assert f"vllm:prefix_cache_hits_total{label} 3.0" in lines
    assert f"vllm:kv_cache_usage_perc{label} 0.0" in lines


async def test_texts_of_tenants_are_read_in_turns() -> None:
    """Who asks for much at once does not keep another waiting behind all of it."""
    turns, order = TextTurns(Weights(dict.fromkeys(PriorityClass, 1.0)), 100), list[str]()
    deadline = asyncio.get_running_loop().time() + 10.0

    async def read(tenant: str) -> None:
        async with turns.turn(tenant, 2**20, deadline):
            await asyncio.sleep(0)
            order.append(tenant)

    greedy = [asyncio.create_task(read("greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(read("modest"), *greedy)
    assert order.index("modest") <= 3
