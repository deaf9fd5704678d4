"""Bodies as clients have sent them, recorded; long texts in them are cut short."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway import Gateway, GatewaySettings
from services.gateway.text import Tokenizer
from tandem.local import RedisServer
from tests.gateway.conftest import make_settings
from tests.gateway.peers import MODEL, Peers, peers_of_long_prompts
from tests.gateway.test_messages_fields import TEMPLATE, template
from tests.gateway.tools.test_calls import says

__all__ = ["says"]  # a fixture
CONTEXT = 65_536
RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
async def settings(redis: RedisServer) -> GatewaySettings:
    return make_settings(redis)


@pytest.fixture
async def peers(settings: GatewaySettings) -> AsyncIterator[Peers]:
    async with peers_of_long_prompts(settings, CONTEXT, lambda spec: [5]) as peers:
        yield peers


async def test_anthropics_tool_runner(
    gateway: Gateway, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    """As anthropic 2.12 sends it: at first it asks for a thread, which is not kept here."""
    seen = says("Done.")
    template(gateway, TEMPLATE)
    first, *others = json.loads((RECORDED / "anthropic_tool_runner.json").read_text(encoding="utf-8"))
    answer = await http.post("/v1/messages?beta=true", json=first | {"model": MODEL})
    assert (answer.status_code, answer.json()["error"]["details"]["error_code"]) == (400, "thread_unsupported_request")
    for body in others:
        answer = await http.post("/v1/messages?beta=true", json=body | {"model": MODEL})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["cache_creation_input_tokens"] > 0
    prompt = tokenizer.decode(seen[-1].token_ids, skip_special_tokens=False)
    assert prompt.startswith("[tool_0][tool_1][write_notes][append_notes][read_notes]<system>You are an agent.")
    assert '<assistant>(Which tool?)Let me.write_notes{"path": "notes.txt", "text": "one\\n"}\n<tool>written' in prompt
    assert prompt.endswith("<tool>one\ntwo\ntwo\n\n<assistant>True")
