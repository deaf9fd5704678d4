from __future__ import annotations

import httpx

from tests.gateway.conftest import TEXT
from tests.gateway.peers import MODEL, Peers


async def test_completion(http: httpx.AsyncClient, peers: Peers) -> None:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "once upon", "seed": 0})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["text"] == TEXT
    assert body["choices"][0]["finish_reason"] == "stop"
