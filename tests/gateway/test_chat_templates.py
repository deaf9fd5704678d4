"""Chats of API clients, rendered by templates of many shapes as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.gateway.apis.chat import read_messages
from services.gateway.apis.openai.schema import ChatMessage
from services.gateway.untrusted import ChatTemplate, TemplateOptions, TemplateRefused
from tests.gateway.chat_templates import SHAPES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<img>"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Köln", "<b>"]}, "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells 'it'", "parameters": PARAMETERS}}
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1]}},
}
USER = {"role": "user", "content": " Hi <b> 狐 {{ x }}\n"}
SYSTEM = {"role": "system", "content": "Be\n brief."}
ANSWER = {"role": "assistant", "content": "<think>a\nb</think>\n\nYes."}
CHATS: dict[str, Sequence[Mapping[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER, ANSWER, USER],
    "system and turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And?"}],
    "ends with an answer": [USER, ANSWER],
    "no text": [{"role": "user", "content": ""}, ANSWER, USER],
    "thoughts": [USER, {**ANSWER, "content": "No.", "reasoning_content": "hm\n"}, USER],
    "names": [{**USER, "name": "ann"}, ANSWER, {**USER, "name": "bob"}],
    "calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
              {"role": "tool", "content": "18 °C", "tool_call_id": "abc123def"}, USER],
}  # fmt: skip
VARIABLES: Sequence[dict[str, Any]] = ({}, {"enable_thinking": False, "reasoning_effort": "low", "categories": ["S9"]})


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(demo_model / "tokenizer.json"), **TOKENS)


def in_parts(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(template.facts.formed(message)) for message in messages]


def from_client(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages as a gateway reads them of an OpenAI body, in which arguments are text."""
    said = json.loads(json.dumps(messages))
    for call in (call for message in said for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return read_messages([ChatMessage.model_validate(message) for message in said])


def both(theirs: Any, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[str | None]:
    """Returns the text of each; None where it refuses the messages."""
    tools, continued = more.pop("tools", None), more.pop("continue_final_message", False)
    theirs.chat_template = template.source
    try:
        expected = theirs.apply_chat_template(
            in_parts(template, messages), tools, tokenize=False, add_generation_prompt=not continued,
            continue_final_message=continued, **more,
        )  # fmt: skip
    except Exception:  # jinja2's and Python's own: whatever a template raises
        expected = None
    options = TemplateOptions(not continued, continued, more, tools or ())
    try:
        return [template.render(from_client(messages), options), expected]
    except TemplateRefused:
        return [None, expected]


@pytest.mark.parametrize("name", SHAPES)
def test_a_chat_is_rendered_as_transformers_does(theirs: Any, name: str) -> None:
    template = ChatTemplate(SHAPES[name].source, TOKENS)
    rendered = 0
    for chat, messages in CHATS.items():
        for variables in VARIABLES:
            for tools in (None, [TOOL]):
                ours, expected = both(theirs, template, messages, tools=tools, **variables)
                assert ours == expected, (name, chat, variables, tools)
                rendered += ours is not None
    assert rendered > 8, "a template that refuses nearly everything proves nothing"


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_is_continued_as_transformers_does(theirs: Any, name: str) -> None:
    template = ChatTemplate(SHAPES[name].source, TOKENS)
    for text in ("Once upon", "with space "):
        chat = [USER, {"role": "assistant", "content": text}]
        ours, expected = both(theirs, template, chat, continue_final_message=True)
        assert ours == expected, (name, text)


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_shows_content_in_the_form_that_it_wants(name: str) -> None:
    template = ChatTemplate(SHAPES[name].source, TOKENS)
    assert dict(template.facts.forms)["user"] == SHAPES[name].content
    text, parts = (
        template.render([{"role": "user", "content": content}])
        for content in ("pick a lock", [{"type": "text", "text": "pick a lock"}])
    )
    assert text == parts
    assert "pick a lock" in text


def test_parts_are_lines_where_a_template_shows_text() -> None:
    template = ChatTemplate(SHAPES["chatml"].source, TOKENS)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "a\nb"}]
    )


def test_parts_stay_parts_where_a_template_shows_them(theirs: Any) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    for name in ("walks over parts", "either of the two", "the system as a prefix"):
        ours, expected = both(theirs, ChatTemplate(SHAPES[name].source, TOKENS), [{"role": "user", "content": parts}])
        assert ours == expected, name
