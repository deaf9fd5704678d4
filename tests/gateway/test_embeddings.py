"""/v1/embeddings: what prefill workers are asked for, and what clients get, refused and lost workers included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from grpc import StatusCode
from hypothesis import strategies as st
from openai import AsyncOpenAI

from services.gateway.text import Tokenizer
from tests.fuzzing import collected
from tests.gateway.peers import MODEL, Peers, embedding_of

TEXTS = ["once upon a time", "the quick brown fox"]


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_every_form_of_input_has_its_vectors(client: AsyncOpenAI, peers: Peers, tokenizer: Tokenizer) -> None:
    ids = [list(tokenizer.token_ids(text)) for text in TEXTS]
    for said, prompts in ((TEXTS[0], ids[:1]), (TEXTS, ids), (ids[0], ids[:1]), (ids, ids), ([TEXTS[0], ids[1]], ids)):
        for encoding in ({"encoding_format": "float"}, {"encoding_format": "base64"}, {}):
            answer = await client.embeddings.create(model=MODEL, input=said, **encoding)  # type: ignore[call-overload]
            if encoding.get("encoding_format") == "base64":
                continue  # as text, which is not what the client's type says
            assert [list(item.embedding) for item in answer.data] == [embedding_of(prompt) for prompt in prompts]
            assert [(item.index, item.object) for item in answer.data] == [
                (i, "embedding") for i in range(len(prompts))
            ]
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
            assert (answer.model, answer.object) == (MODEL, "list")
    assert not peers.decode.seen  # prefill workers alone
    assert {spec.sampling.max_tokens for spec in peers.prefill.seen} == {1}


async def test_as_many_texts_as_with_openai(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = await client.embeddings.create(model=MODEL, input=TEXTS * 512)
    wanted = [pytest.approx(embedding_of(list(tokenizer.token_ids(text))), abs=1e-6) for text in TEXTS]
    assert [item.embedding for item in answer.data] == wanted * 512


async def test_dimensions_go_to_the_worker(client: AsyncOpenAI, peers: Peers) -> None:
    answer = await client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=2)
    assert len(answer.data[0].embedding) == 2
    assert [spec.embedding.dimensions for spec in peers.prefill.seen] == [2]


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[1], [2, "b"]]}, "input[1]"),
        ({"input": [2**31]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "a " * 2000}, "input"),
        ({"input": ["a"] * 100_000}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": 7}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2**40}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, said: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": "hi"} | said)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


async def test_more_numbers_than_the_model_has_are_refused(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.prefill.refuse = StatusCode.INVALID_ARGUMENT
    peers.prefill.refusal = "dimensions: must be between 1 and 4, got 9"
    answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": "hi", "dimensions": 9})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")


async def test_an_unknown_model_is_a_404(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/embeddings", json={"model": "nobody", "input": "hi"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


async def test_another_worker_computes_what_a_lost_one_had(http: httpx.AsyncClient, peers: Peers) -> None:
    first, lost = peers.prefill, peers.workers["p"]
    first.hold.clear()
    asked = asyncio.create_task(http.post("/v1/embeddings", json={"model": MODEL, "input": [5, 6, 7]}))
    while not first.running:
        await asyncio.sleep(0.01)
    await peers.add_prefill("p2")
    await lost.die()
    answer = await asked
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["embedding"] == embedding_of([5, 6, 7])
    assert answer.headers["x-tandem-migrated"] == "1"


async def test_a_worker_that_comes_back_computes_what_it_had(http: httpx.AsyncClient, peers: Peers) -> None:
    """Nobody else is there meanwhile; it is waited for as long as the settings say, half a second here."""
    first, lost = peers.prefill, peers.workers["p"]
    first.hold.clear()
    asked = asyncio.create_task(http.post("/v1/embeddings", json={"model": MODEL, "input": [5, 6, 7]}))
    while not first.running:
        await asyncio.sleep(0.01)
    await lost.die()
    await peers.registry.leases.deregister("p", lost.info.incarnation)
    await peers.add_prefill()
    answer = await asked
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-migrated"] == "1"


async def test_a_client_that_leaves_ends_its_work(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.prefill.hold.clear()
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/embeddings", json={"model": MODEL, "input": TEXTS}, timeout=0.3)
    async with asyncio.timeout(5):
        while len(peers.prefill.cancelled) < 2:
            await asyncio.sleep(0.01)


async def test_a_deadline_ends_it(http: httpx.AsyncClient, peers: Peers) -> None:
    peers.prefill.hold.clear()
    answer = await http.post(
        "/v1/embeddings", json={"model": MODEL, "input": "hi"}, headers={"x-request-timeout": "0.2"}
    )
    assert answer.status_code == 504, answer.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.sampled_from(["input", "dimensions", "encoding_format", "truncate_prompt_tokens", "user", "priority", "n"]), JSON
)


async def test_nothing_that_is_sent_is_a_fault_of_ours(http: httpx.AsyncClient) -> None:
    for fields in collected(FIELDS, 60):
        answer = await http.post("/v1/embeddings", content=json.dumps({"model": MODEL, "input": "hi"} | fields))
        assert answer.status_code in (200, 400), (fields, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"], (fields, answer.text)


async def test_without_prefill_workers_it_is_refused(http: httpx.AsyncClient, peers: Peers) -> None:
    peer = peers.workers["p"]
    await peers.registry.leases.deregister("p", peer.info.incarnation)
    await peer.die()
    answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": "hi"}, headers={"x-request-timeout": "5"})
    assert answer.status_code == 503, answer.text
