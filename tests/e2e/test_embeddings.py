"""Embeddings by a real prefill worker: the last hidden state that transformers has of the same weights."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM

from tests.e2e.cluster import RunningCluster
from tests.e2e.test_exact import prompt_of

pytestmark = pytest.mark.long
PROMPTS = [prompt_of(length, length) for length in (1, 16, 33, 300)]


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.inference_mode():
        states = [model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in PROMPTS]
    return [torch.nn.functional.normalize(state, dim=0) for state in states]


def test_vectors_equal_transformers(shm_cluster: RunningCluster, expected: list[torch.Tensor]) -> None:
    with OpenAI(base_url=f"{shm_cluster.http}/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):  # computed, and cached
            answer = client.embeddings.create(model="tandem-demo", input=PROMPTS)
            for item, wanted in zip(answer.data, expected, strict=True):
                torch.testing.assert_close(torch.tensor(item.embedding), wanted, atol=1e-5, rtol=1e-4)
        assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
        with pytest.raises(BadRequestError) as error:
            client.embeddings.create(model="tandem-demo", input="hi", dimensions=len(expected[0]) + 1)
        assert error.value.param == "dimensions"


def test_base64_is_the_same_numbers_cut_to_length_1(shm_cluster: RunningCluster, expected: list[torch.Tensor]) -> None:
    body: dict[str, Any] = {"model": "tandem-demo", "input": PROMPTS, "dimensions": 8, "encoding_format": "base64"}
    answer = httpx.post(f"{shm_cluster.http}/v1/embeddings", json=body, timeout=60)
    assert answer.headers["x-tandem-prefill-worker"]
    assert "x-tandem-decode-worker" not in answer.headers
    for item, wanted in zip(answer.json()["data"], expected, strict=True):
        found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
        cut = torch.nn.functional.normalize(wanted[:8], dim=0)
        torch.testing.assert_close(torch.tensor(found.copy()), cut, atol=1e-5, rtol=1e-4)


def test_the_most_alike_comes_first(shm_cluster: RunningCluster, demo_model: Path) -> None:
    """By transformers' states of the same weights and words."""
    query, documents = "the fox", ["once upon a time there was a dragon", "a fox", "42"]
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    words = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))

    def unit(text: str) -> torch.Tensor:
        with torch.inference_mode():
            state = model.base_model(torch.tensor([words.encode(text).ids])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(state, dim=0)

    wanted = {i: float(unit(query) @ unit(text)) for i, text in enumerate(documents)}
    body = {"model": "tandem-demo", "query": query, "documents": documents}
    results = httpx.post(f"{shm_cluster.http}/v1/rerank", json=body, timeout=60).json()["results"]
    assert [one["index"] for one in results] == sorted(wanted, key=lambda i: -wanted[i])
    assert [one["relevance_score"] for one in results] == pytest.approx([wanted[o["index"]] for o in results], abs=1e-5)
