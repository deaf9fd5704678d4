"""Fields of /v1/messages that agents send: what the template, workers and clients see of them. By Anthropic's SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from services.gateway import Gateway
from services.gateway.apis.messages import MESSAGES, MessagesBody
from services.gateway.apis.messages.schema import asks_to_cache
from services.gateway.apis.openai.schema import validated
from services.gateway.bodies import PromptBounds
from services.gateway.text import Tokenizer
from services.gateway.untrusted import ChatTemplate
from tests.gateway.peers import MODEL
from tests.gateway.tools.test_calls import CALL, PLACE, prompt_in, says

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

__all__ = ["says"]  # a fixture
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{{ enable_thinking }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}\n"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
THOUGHT = "<think>\nWhere is it?\n</think>\n\nIn Lund."
USER = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": [USER]}
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture
async def anthropic(http: httpx.AsyncClient) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client, which takes no answer that is not as its types say."""
    from anthropic import AsyncAnthropic  # seconds, so only where a test asks for it

    async with AsyncAnthropic(
        base_url=str(http.base_url), api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def template(gateway: Gateway, source: str) -> None:
    object.__setattr__(gateway.directory.llm_of(None).model, "chat_template", ChatTemplate(source, {}))


async def whole_and_streamed(anthropic: AsyncAnthropic, **body: Any) -> list[dict[str, Any]]:
    """The message, asked for once and without what is new each time; it is the same in both ways."""
    found = []
    whole = await anthropic.messages.create(**ASKED | body)
    async with anthropic.messages.stream(**ASKED | body) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        said = message.model_dump(exclude={"id"}, exclude_none=True)
        assert said.pop("usage")["output_tokens"] > 0
        for block in said["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
            assert block.pop("signature", "any")
        found.append(said)
    assert found[0] == found[1]
    return found[0]["content"]


@pytest.mark.parametrize(
    ("thinking", "budget", "heard"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, 2000, "True"),
        ({"type": "adaptive"}, None, "True"),
        ({"type": "between_tools"}, None, "True"),
        ({"type": "disabled"}, 0, "False"),
        (None, 0, "False"),
    ],
)
async def test_thinking(
    gateway: Gateway, anthropic: AsyncAnthropic, says: Any, tokenizer: Tokenizer, thinking: Any, budget: Any, heard: str
) -> None:
    seen = says(THOUGHT)
    template(gateway, TEMPLATE)
    thoughts, text = await whole_and_streamed(anthropic, **({"thinking": thinking} if thinking else {}))
    assert (thoughts["type"], thoughts["thinking"], text["text"]) == ("thinking", "Where is it?", "In Lund.")
    sampling = seen[0].sampling
    assert (sampling.thinking_token_budget if sampling.HasField("thinking_token_budget") else None) == budget
    assert prompt_in(seen, tokenizer) == f"<user>hi\n<assistant>{heard}"


async def test_thoughts_may_be_hidden_and_go_back_into_the_prompt(
    gateway: Gateway, anthropic: AsyncAnthropic, says: Any, tokenizer: Tokenizer
) -> None:
    says(THOUGHT)
    template(gateway, TEMPLATE)
    hidden, _ = await whole_and_streamed(anthropic, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden == {"type": "thinking", "thinking": ""}
    thoughts, text = await whole_and_streamed(anthropic, thinking={"type": "adaptive"})
    seen = says("Good.")
    redacted = {"type": "redacted_thinking", "data": "x"}
    history = [USER, {"role": "assistant", "content": [redacted, {**thoughts, "signature": ""}, text]}, USER]
    await anthropic.messages.create(**ASKED | {"messages": history})
    assert prompt_in(seen, tokenizer).startswith("<user>hi\n<assistant>(Where is it?)In Lund.\n<user>hi\n")


async def test_a_model_that_does_not_think_is_asked_to_all_the_same(anthropic: AsyncAnthropic) -> None:
    for thinking in ({"type": "enabled", "budget_tokens": 100}, {"type": "adaptive"}):
        (text,) = await whole_and_streamed(
            anthropic, thinking=thinking, output_config={"effort": "max"}, extra_body={"seed": 0}
        )
        assert text["type"] == "text"


async def test_effort_and_format(anthropic: AsyncAnthropic, http: httpx.AsyncClient, says: Any) -> None:
    form = {"type": "json_schema", "schema": PLACE}
    seen = says('{"city": "Lund"}')
    await whole_and_streamed(anthropic, thinking={"type": "adaptive"}, output_config={"effort": "low", "format": form})
    assert seen[0].sampling.thinking_token_budget == 1024
    assert "city" in seen[0].sampling.grammar
    seen = says('{"city": "Lund"}')
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    beta = await anthropic.beta.messages.create(
        **ASKED, extra_body={"output_format": form}, context_management=edits, betas=["context-management-2025-06-27"]
    )
    assert beta.context_management
    assert beta.context_management.applied_edits == []
    assert "city" in seen[0].sampling.grammar


async def test_the_assistants_last_message_is_continued(
    gateway: Gateway, anthropic: AsyncAnthropic, http: httpx.AsyncClient, says: Any, tokenizer: Tokenizer
) -> None:
    text = {"type": "text", "text": "The answer is (", "cache_control": EPHEMERAL}
    for content in ("The answer is (", [{"type": "thinking", "thinking": "Hm.", "signature": ""}, text]):
        seen = says("B)")
        template(gateway, TEMPLATE)
        messages = [USER, {"role": "assistant", "content": content}]
        (rest,) = await whole_and_streamed(anthropic, messages=messages)
        assert rest["text"] == "B)"
        assert prompt_in(seen, tokenizer).endswith("The answer is (")
        counted = await anthropic.messages.count_tokens(model=MODEL, messages=messages)
        assert counted.input_tokens == len(seen[0].token_ids)
    seen = says("So?")
    await anthropic.messages.create(**ASKED | {"messages": [USER, {"role": "assistant", "content": ""}]})
    assert prompt_in(seen, tokenizer).endswith("<user>hi\n<assistant>False")
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match="their results must follow"):
        await anthropic.messages.create(**ASKED | {"messages": [USER, {"role": "assistant", "content": [used]}]})


async def test_system_messages_stand_where_the_template_takes_them(
    gateway: Gateway, anthropic: AsyncAnthropic, says: Any, tokenizer: Tokenizer
) -> None:
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "Large. " * 9000)]
    answer = {"role": "assistant", "content": "so"}
    messages = [{"role": "system", "content": "First."}, USER, answer, USER, {"role": "system", "content": "Now."}]
    first = "Large. " * 9000 + "\nFirst."
    for source, expected in (
        (TEMPLATE, f"<system>{first}\n<user>hi\n<assistant>so\n<user>hi\n<system>Now.\n<assistant>False"),
        (STRICT, f"<system>{first}\n<user>hi\n<assistant>so\n<user>hi\nNow.\n"),
        (NO_SYSTEM, f"<user>{first}\nhi\n<assistant>so\n<user>hi\nNow.\n"),
    ):
        says("ok")
        template(gateway, source)
        model = gateway.directory.llm_of(None).model
        text = prompt_of(model.chat_template, {"system": blocks, "messages": messages})
        assert text == expected
    short = [{"type": "text", "text": "Small."}]
    seen = says("ok")
    template(gateway, NO_SYSTEM)
    await anthropic.messages.create(**ASKED | {"system": short})
    assert prompt_in(seen, tokenizer) == "<user>Small.\nhi\n"


def prompt_of(chat_template: ChatTemplate | None, body: dict[str, Any]) -> str:
    """The prompt that the helper process makes of it, which reads large bodies."""
    bounds = PromptBounds(prompts=8, tokens=131_072, characters=10**6, vocab_size=1000)
    (text,) = MESSAGES.reduce(json.dumps(ASKED | body).encode(), bounds, chat_template).prompts
    assert isinstance(text, str)
    return text


async def test_deferred_tools_are_offered_once_they_were_found(
    gateway: Gateway, anthropic: AsyncAnthropic, says: Any, tokenizer: Tokenizer
) -> None:
    find = {"name": "find", "input_schema": {}}
    tools = [find, {"name": "weather", "input_schema": PLACE, "defer_loading": True},
             {"name": "time", "input_schema": {}, "defer_loading": True}]  # fmt: skip
    found = {"type": "tool_reference", "tool_name": "weather", "cache_control": EPHEMERAL}
    history = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "find", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [found]}]},
    ]
    hosted = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    for more, begin in (
        ({}, "[find]<user>hi"),
        ({"messages": history}, "[find][weather]<user>hi\n<assistant>find{}\n<tool>weather\n"),
        ({"tool_choice": {"type": "tool", "name": "time"}}, "[find][time]<user>"),
        ({"tools": [hosted, *tools]}, "[find][weather][time]<user>"),
    ):
        seen = says("{}" if "tool_choice" in more else "ok")
        template(gateway, TEMPLATE)
        await anthropic.beta.messages.create(**ASKED | {"tools": tools} | more)
        assert prompt_in(seen, tokenizer).startswith(begin)
        reduced = prompt_of(gateway.directory.llm_of(None).model.chat_template, {"tools": tools} | more)
        assert reduced.startswith(begin)


async def test_what_was_cached_is_told(anthropic: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    text = {"type": "text", "text": "a b c " * 20}
    marked = {**text, "cache_control": EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [marked]}
    large = [{"type": "thinking", "thinking": "x" * 300_000, "signature": ""}, text]
    places: list[dict[str, Any]] = [
        {"system": [marked]},
        {"messages": [{"role": "user", "content": [marked]}]},
        {"cache_control": EPHEMERAL},
        {"system": [marked], "messages": [USER, {"role": "assistant", "content": large}, USER]},
    ]
    for body in places:
        used = (await anthropic.messages.create(**ASKED | {"system": [text]} | body)).usage
        assert used.cache_read_input_tokens == 3  # as the peers say
        assert used.cache_creation_input_tokens
        assert (used.cache_creation_input_tokens + 3) % 16 == 0
        assert 0 <= used.input_tokens < 16
    free = (await anthropic.messages.create(**ASKED | {"system": [text]})).usage
    assert (free.cache_creation_input_tokens, free.cache_read_input_tokens) == (0, 3)
    assert free.input_tokens > 16
    assert asks_to_cache(validated(MessagesBody, json.dumps(ASKED | {"messages": [
        {"role": "user", "content": [result]}]}).encode()))  # fmt: skip


async def test_input_comes_whole_or_as_it_is_written(http: httpx.AsyncClient, says: Any) -> None:
    says(CALL)
    tool = {"name": "weather", "input_schema": PLACE}
    for eager, least, most in ((True, 2, 100), (False, 1, 1)):
        body = {**ASKED, "tools": [{**tool, "eager_input_streaming": eager}], "stream": True}
        answer = await http.post("/v1/messages", json=body)
        parts = [json.loads(line[6:])["delta"]["partial_json"] for line in answer.text.splitlines()
                 if line.startswith("data:") and "input_json_delta" in line]  # fmt: skip
        assert least <= len([part for part in parts if part]) <= most
        assert json.loads("".join(parts)) == {"city": "Malmö"}
