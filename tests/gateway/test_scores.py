"""/v1/score and /v1/rerank: cosines of the embeddings that prefill workers give."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import strategies as st

from services.gateway.bodies import LARGE
from services.gateway.text import Tokenizer
from tests.fuzzing import collected
from tests.gateway.peers import MODEL, Peers, embedding_of
from tests.gateway.test_embeddings import JSON

QUERY, DOCUMENTS = "the fox", ["once upon a time", "the dog", "a"]


def cosine(tokenizer: Tokenizer, one: str, other: str) -> float:
    a, b = (np.array(embedding_of(tokenizer.token_ids(text))) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("padding", [0, LARGE])
async def test_documents_come_in_order(
    http: httpx.AsyncClient, peers: Peers, tokenizer: Tokenizer, padding: int
) -> None:
    body = {"model": MODEL, "query": QUERY, "documents": [*DOCUMENTS[:2], {"text": "a"}], "padding": "x" * padding}
    answer = (await http.post("/v1/rerank", json=body)).json()
    wanted = {i: cosine(tokenizer, QUERY, text) for i, text in enumerate(DOCUMENTS)}
    results = answer["results"]
    assert [one["index"] for one in results] == sorted(wanted, key=lambda i: -wanted[i])
    for one in results:
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=1e-6)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["total_tokens"] == sum(len(tokenizer.token_ids(text)) for text in (QUERY, *DOCUMENTS))
    few = (await http.post("/v1/rerank", json={**body, "top_n": 1, "return_documents": False})).json()["results"]
    assert few == [{"index": results[0]["index"], "relevance_score": results[0]["relevance_score"]}]
    assert not peers.decode.seen


@pytest.mark.long
@pytest.mark.parametrize("padding", [0, LARGE])
@pytest.mark.parametrize("first", [QUERY, [QUERY], [QUERY, "a dog", "once"]])
async def test_scores_of_one_with_all_or_of_pairs(
    http: httpx.AsyncClient, tokenizer: Tokenizer, first: str | list[str], padding: int
) -> None:
    body = {"model": MODEL, "text_1": first, "text_2": DOCUMENTS, "padding": "x" * padding}
    answer = (await http.post("/v1/score", json=body)).json()
    left = [first] * 3 if isinstance(first, str) else first * (3 // len(first))
    wanted = [cosine(tokenizer, one, other) for one, other in zip(left, DOCUMENTS, strict=True)]
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(3)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "said", "param"),
    [
        ("/v1/score", {"text_1": ""}, "text_1"),
        ("/v1/score", {"text_1": 2}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"]}, "text_2"),
        ("/v1/score", {"text_2": []}, "text_2"),
        ("/v1/score", {"text_2": ["a", 1, "b"]}, "text_2[1]"),
        ("/v1/score", {"text_2": ["a"] * 3000}, "text_2"),
        ("/v1/score", {"text_2": "a " * 2000}, "text_2"),
        ("/v1/score", {"stream": True}, "stream"),
        ("/v1/rerank", {"query": ""}, "query"),
        ("/v1/rerank", {"query": ["a"]}, "query"),
        ("/v1/rerank", {"documents": None}, "documents"),
        ("/v1/rerank", {"documents": [{"title": "a"}]}, "documents[0]"),
        ("/v1/rerank", {"documents": ["a"] * 3000}, "documents"),
        ("/v1/rerank", {"top_n": 0}, "top_n"),
        ("/v1/rerank", {"top_n": "1"}, "top_n"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, path: str, said: dict[str, Any], param: str) -> None:
    right = {"model": MODEL, "text_1": "a", "text_2": ["a", "b", "c"], "query": "a", "documents": ["a"]}
    answer = await http.post(path, json=right | said)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
async def test_nothing_that_is_sent_is_a_fault_of_ours(http: httpx.AsyncClient, path: str) -> None:
    right = {"model": MODEL, "text_1": "a", "text_2": ["a", "b"], "query": "a", "documents": ["a"]}
    names = st.sampled_from([*right.keys() - {"model"}, "top_n", "return_documents", "truncate_prompt_tokens", "user"])
    for fields in collected(st.dictionaries(names, JSON), 60):
        answer = await http.post(path, content=json.dumps(right | fields))
        assert answer.status_code in (200, 400), (fields, answer.text)
