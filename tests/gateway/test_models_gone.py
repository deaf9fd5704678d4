"""A model whose workers have left takes with it what is large of it: no search for garbage has to find that."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from tests.gateway.conftest import OTHER, eventually, joined, leave
from tests.gateway.peers import Peers


async def test_nothing_large_of_it_stays(
    gateway: Gateway, http: httpx.AsyncClient, others: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.directory.roster.GONE_S", 0.1)
    given_back = list[int]()
    monkeypatch.setattr("services.gateway.directory.roster.give_back", lambda: given_back.append(1))
    await joined(gateway)
    messages = [{"role": "user", "content": "once upon a time " * 400}]
    for path, body in (("chat/completions", {"messages": messages}), ("completions", {"prompt": "x"})):
        asked: Any = {"model": OTHER, "max_tokens": 2, **body}
        assert (await http.post(f"/v1/{path}", json=asked)).status_code in (200, 400)
    gc.collect()
    gc.disable()
    try:
        (llm,) = gateway.directory.versions(OTHER)
        parts = [weakref.ref(part) for part in (llm.model.tokenizer, llm.model.helper, llm.pipeline, llm.admission)]
        del llm
        await leave(others, "other-d", "other-p")
        await eventually(lambda: not gateway.directory.versions(OTHER) and not any(part() for part in parts), 5.0)
        await eventually(lambda: given_back == [1])
    finally:
        gc.enable()
