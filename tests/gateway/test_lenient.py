"""Requests are refused no more strictly than by the APIs that are spoken: hints, documents, what others have made."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway.bodies import LARGE
from tandem import grammar
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_http import CHAT
from tests.gateway.test_messages_fields import USER
from tests.gateway.tools.test_calls import says

__all__ = ["says"]  # a fixture
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 9},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 9},
    "/v1/messages": {"model": MODEL, "messages": [USER], "max_tokens": 9},
}
CHATS, RESPONSES, MESSAGES = PATHS
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HELD = {
    "structured_outputs": ({"regex": "a+"}, grammar.of_regex("a+")),
    "guided_json": (SCHEMA, grammar.of_json_schema(SCHEMA)),
    "guided_regex": ("b+", grammar.of_regex("b+")),
    "guided_choice": (["x", "y"], grammar.of_choice(["x", "y"])),
    "guided_grammar": ('start: "a"', grammar.of_grammar('start: "a"')),
}


async def post(http: httpx.AsyncClient, path: str, **more: Any) -> Any:
    answer = await http.post(path, json=PATHS[path] | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(http: httpx.AsyncClient, path: str, **more: Any) -> Any:
    """Returns what the error says of the field that is wrong; Anthropic's errors have no place for its name."""
    answer = await http.post(path, json=PATHS[path] | more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"] if path == MESSAGES else (error["param"], error["message"])


@pytest.mark.parametrize(
    ("path", "hints"),
    [
        (CHATS, {"verbosity": "high", "reasoning_effort": "ultra", "service_tier": "fast", "store": True}),
        (CHATS, {"prediction": {"type": "content", "content": [{"type": "text", "text": "x"}] * 9}}),
        (CHATS, {"prediction": {"type": "content", "content": "x" * LARGE}}),
        (CHATS, {"prompt_cache_retention": "forever", "prompt_cache_key": "k", "safety_identifier": "s"}),
        (RESPONSES, {"text": {"verbosity": "high"}, "reasoning": {"effort": "ultra", "summary": "long"}}),
        (RESPONSES, {"service_tier": "fast", "prompt_cache_retention": "forever", "max_tool_calls": 3}),
        (RESPONSES, {"context_management": []}),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "updates"}, "output_config": {"effort": "ultra"}}),
        (MESSAGES, {"service_tier": "fast", "metadata": {"user_id": 5}, "betas": ["new-2030-01-01"]}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_hints_that_nobody_knows_are_as_none(
    http: httpx.AsyncClient, peers: Peers, path: str, hints: dict[str, Any]
) -> None:
    await post(http, path)
    await post(http, path, **hints)
    plain, hinted = peers.decode.seen
    assert (hinted.token_ids, hinted.priority) == (plain.token_ids, plain.priority)


async def test_a_hint_is_a_short_text(http: httpx.AsyncClient) -> None:
    for path, hints, named in (
        (CHATS, {"verbosity": 5}, "verbosity"),
        (RESPONSES, {"text": {"verbosity": "x" * 600}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"summary": "x" * 600}}, "reasoning.summary"),
        (RESPONSES, {"max_tool_calls": 0}, "max_tool_calls"),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "x" * 600}}, "thinking.display"),
        (MESSAGES, {"output_config": {"effort": 3}}, "output_config.effort"),
    ):
        assert named in str(await refusal(http, path, **hints))


async def test_thoughts_with_an_unknown_display_are_shown(http: httpx.AsyncClient, says: Any) -> None:
    says("<think>\nHm.\n</think>\n\nSo.")
    thoughts, _ = (await post(http, MESSAGES, max_tokens=99, thinking={"type": "adaptive", "display": "updates"}))[
        "content"
    ]
    assert thoughts["thinking"] == "Hm."


@pytest.mark.parametrize("path", PATHS)
async def test_what_must_hold_the_answer_does(http: httpx.AsyncClient, peers: Peers, path: str) -> None:
    for name, (said, expected) in HELD.items():
        await post(http, path, **{name: said}, x="x" * (LARGE if name == "guided_regex" else 0))
        assert peers.decode.seen[-1].sampling.grammar == expected
        assert "guided_json" in str(await refusal(http, path, guided_json=SCHEMA, structured_outputs={"regex": "a"}))
    assert "structured_outputs" in str(await refusal(http, path, structured_outputs={"regex": 5}))


async def test_responses_that_cannot_be_as_asked_are_refused(http: httpx.AsyncClient) -> None:
    compacted = [{"type": "compaction", "compact_threshold": 1000}]
    param, _ = await refusal(http, RESPONSES, context_management=compacted)
    assert param == "context_management"
    for name, ours in (("response_format", "text.format"), ("max_completion_tokens", "max_output_tokens")):
        param, message = await refusal(http, RESPONSES, **{name: {"type": "json_object"}})
        assert param == name
        assert ours in message
    form = {"format": {"type": "json_object"}}
    _, message = await refusal(http, RESPONSES, text=form, guided_regex="a")
    assert message.startswith("text.format and guided_regex ")
