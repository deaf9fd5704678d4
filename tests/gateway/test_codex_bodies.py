"""Bodies of Codex, as tests/e2e/test_codex.py has seen them, are answered as they ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway import GatewaySettings
from services.gateway.text import Tokenizer
from tandem.local import RedisServer
from tests.gateway.conftest import make_settings
from tests.gateway.peers import MODEL, Peers, peers_of_long_prompts
from tests.gateway.recorded import codex_bodies
from tests.gateway.tools.test_calls import prompt_in, says
from tests.gateway.tools.test_response_calls import call_of

__all__ = ["says"]  # a fixture
CONTEXT = 8192


@pytest.fixture
def settings(redis: RedisServer) -> GatewaySettings:
    return make_settings(redis)


@pytest.fixture
async def peers(settings: GatewaySettings) -> AsyncIterator[Peers]:
    async with peers_of_long_prompts(settings, CONTEXT, lambda spec: [0]) as peers:
        yield peers


@pytest.mark.parametrize("number", range(2))
async def test_a_recorded_body_is_answered(
    http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer, number: int
) -> None:
    body: dict[str, Any] = codex_bodies()[number]
    seen = says(call_of("multi_agent_v1__close_agent", '{"target": "a"}') + call_of("exec_command", '{"cmd": "ls"}'))
    answer = await http.post("/v1/responses", json={**body, "model": MODEL, "stream": False})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    closed, ran = found["output"]
    assert (closed["name"], closed["namespace"], ran["name"]) == ("close_agent", "multi_agent_v1", "exec_command")
    assert "namespace" not in ran
    assert found["store"] is False
    kinds = [tool["type"] for tool in found["tools"]]
    assert kinds == [tool["type"] for tool in body["tools"] if tool["type"] != "web_search"]
    prompt = prompt_in(seen, tokenizer)
    assert "[exec_command]" in prompt
    assert "web_search" not in prompt
    assert prompt.count("<system>") == 1
    assert ("<tool>" in prompt) == any(item["type"] == "function_call_output" for item in body["input"])
    streamed = await http.post("/v1/responses", json={**body, "model": MODEL})
    assert streamed.text.count("event: response.output_item.done") == 2
    assert "event: response.completed" in streamed.text
