"""A message says the same whole and streamed, whatever the model writes, and nothing vanishes but calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st

from services.gateway import Gateway
from services.gateway.tools import FORMATS
from tests.fuzzing import collected
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_messages_fields import anthropic
from tests.gateway.tiny_model import EOS
from tests.gateway.tools.test_calls import says
from tests.gateway.tools.test_parts import SCHEMAS
from tests.gateway.tools.test_whole_and_streamed import MARKS, written

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

__all__ = ["anthropic", "says"]  # fixtures
TOOLS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
ASKED: dict[str, Any] = {
    "model": MODEL, "max_tokens": 2000, "tools": TOOLS, "messages": [{"role": "user", "content": "hi"}],
}  # fmt: skip


def _said(message: Any) -> tuple[Any, ...]:
    """Its texts, thoughts and calls; text behind a call is a block of its own in a stream."""
    of = {kind: [block for block in message.content if block.type == kind] for kind in ("text", "thinking", "tool_use")}
    assert len(message.content) == sum(map(len, of.values()))
    calls = [(block.name, json.dumps(block.input)) for block in of["tool_use"]]
    texts = "".join(block.text for block in of["text"]), "".join(block.thinking for block in of["thinking"])
    return *texts, calls, message.stop_reason


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
async def test_mutated_calls(gateway: Gateway, peers: Peers, anthropic: AsyncAnthropic, says: Any, name: str) -> None:
    peers.decode.step_s = 0.0
    thoughts = st.sampled_from(["", "", "<think>\nso\n</think>\n"])
    for text in collected(st.tuples(thoughts, written(name)).map("".join), 12):
        says(text)
        object.__setattr__(gateway.directory.llm_of(None).model, "calls", FORMATS[name])
        whole = await anthropic.messages.create(**ASKED)
        async with anthropic.messages.stream(**ASKED) as stream:
            streamed = await stream.get_final_message()
        assert _said(streamed) == _said(whole), text


async def test_text_that_looks_like_a_call_is_shown(peers: Peers, anthropic: AsyncAnthropic, says: Any) -> None:
    """Asked without tools all of it is text; with tools so is what is none in the model's own format."""
    peers.decode.step_s = 0.0
    for mark in (mark for mark in MARKS if EOS not in mark):
        text = f"see {mark} tag here"
        says(text)
        for tools in ([], TOOLS):
            message = await anthropic.messages.create(**ASKED | {"tools": tools})
            assert _said(message) == (text, "", [], "end_turn")
