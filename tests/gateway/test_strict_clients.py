"""Every endpoint that OpenAI's and Anthropic's clients know, held strictly to their types."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.gateway import GatewaySettings
from tests.gateway.conftest import TEXT, make_settings
from tests.gateway.peers import MODEL
from tests.gateway.test_kept import ended, kept
from tests.gateway.tools.test_calls import says

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

__all__ = ["kept", "says"]  # fixtures
CITY = {"type": "object", "properties": {"city": {"const": "Lund"}}, "required": ["city"]}
QUESTION: Any = [{"role": "user", "content": "hi"}]
CHAT: Any = {"model": MODEL, "messages": QUESTION, "seed": 0}
MESSAGE: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 64, "extra_body": {"seed": 0}}
RESPONSE: Any = {"model": MODEL, "input": "hi", "extra_body": {"seed": 0}}
STRICT: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}


@pytest.fixture
def settings(model_folder: Any, redis: Any, kept: Any) -> GatewaySettings:
    return make_settings(redis, store_url=kept.url)


@pytest.fixture
async def gpt(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", **STRICT) as client:
        yield client


@pytest.fixture
async def anthropic_client(http: httpx.AsyncClient) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic  # seconds, so only where a test asks for it

    async with AsyncAnthropic(base_url=str(http.base_url), **STRICT) as client:
        yield client


async def test_models(gpt: AsyncOpenAI, anthropic_client: AsyncAnthropic) -> None:
    from anthropic import NotFoundError

    assert [model.id async for model in gpt.models.list()] == [MODEL]
    assert (await gpt.models.retrieve(MODEL)).id == MODEL
    assert [model.display_name async for model in anthropic_client.models.list()] == [MODEL]
    found = await anthropic_client.models.retrieve(MODEL)
    assert (found.id, found.lifecycle) == (MODEL, "active")
    assert found.max_input_tokens
    for client, error in ((gpt, openai.NotFoundError), (anthropic_client, NotFoundError)):
        with pytest.raises(error):
            await client.models.retrieve("other")


async def test_chats(gpt: AsyncOpenAI, says: Any) -> None:
    whole = await gpt.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=2, service_tier="auto")
    assert whole.choices[0].message.content == TEXT
    usage: Any = {"stream_options": {"include_usage": True}}
    for more in ({}, usage, {"logprobs": True, "n": 2, **usage}):
        parts = [part async for part in await gpt.chat.completions.create(**CHAT, **more, stream=True)]
        said = [part.choices[0].delta.content or "" for part in parts if part.choices and not part.choices[0].index]
        assert "".join(said) == TEXT
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    forced: Any = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    says('{"city": "Lund"}')
    called = await gpt.chat.completions.create(**CHAT, **forced)
    assert called.choices[0].message.tool_calls
    async with gpt.chat.completions.stream(**CHAT, **forced) as stream:
        calls = (await stream.get_final_completion()).choices[0].message.tool_calls
    assert calls
    assert calls[0].function.arguments == called.choices[0].message.tool_calls[0].function.arguments  # type: ignore[union-attr]


async def test_completions(gpt: AsyncOpenAI) -> None:
    """But for streams and logprobs of an echo, where OpenAI sends null for which the client's types have no place:
    as `finish_reason` until the end, and as how likely a prompt's first token is."""
    asked: Any = {"model": MODEL, "prompt": ["a", "b"], "seed": 0}
    found = await gpt.completions.create(**asked, max_tokens=99, n=2, best_of=3, logprobs=2)
    assert len(found.choices) == 4
    assert (await gpt.completions.create(**asked, echo=True)).choices[0].text.startswith("a")
    raw = await gpt.completions.with_raw_response.create(**asked, stream=True)
    assert '"finish_reason":null' in "".join([line async for line in raw.http_response.aiter_lines()])


async def test_responses(gpt: AsyncOpenAI, says: Any) -> None:
    says('{"city": "Lund"}')
    tool: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    asked: Any = {"tools": [tool], "tool_choice": {"type": "function", "name": "weather"}}
    whole = await gpt.responses.create(**RESPONSE, **asked)
    assert whole.output[0].type == "function_call"
    async with gpt.responses.stream(**RESPONSE, **asked) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output[0].type == "function_call"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    says(TEXT)
    queued = await gpt.responses.create(**RESPONSE, background=True)
    assert (await ended(gpt, queued.id)).output_text == TEXT
    *_, last = [event async for event in await gpt.responses.retrieve(queued.id, stream=True)]
    assert last.type == "response.completed"
    assert [item.type async for item in gpt.responses.input_items.list(queued.id)] == ["message"]
    slow = await gpt.responses.create(
        model=MODEL, input="hi", background=True, max_output_tokens=200, extra_body={"seed": 0, "ignore_eos": True}
    )
    assert (await gpt.responses.cancel(slow.id)).status == "cancelled"
    await gpt.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.input_items.list(queued.id)


async def test_conversations(gpt: AsyncOpenAI) -> None:
    item: Any = {"type": "message", "role": "user", "content": "hi"}
    made = await gpt.conversations.create(items=[item], metadata={"a": "b"})
    await gpt.responses.create(**RESPONSE, conversation=made.id)
    assert (await gpt.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await gpt.conversations.retrieve(made.id)).id == made.id
    await gpt.conversations.items.create(made.id, items=[item])
    items = [one async for one in gpt.conversations.items.list(made.id, limit=3)]
    assert len(items) == 4
    assert (await gpt.conversations.items.retrieve(items[0].id, conversation_id=made.id)).type == "message"  # type: ignore[arg-type]
    assert (await gpt.conversations.items.delete(items[0].id, conversation_id=made.id)).id == made.id  # type: ignore[arg-type]
    assert (await gpt.conversations.delete(made.id)).deleted


async def test_messages(anthropic_client: AsyncAnthropic, says: Any) -> None:
    tool: Any = {"name": "weather", "input_schema": CITY}
    forced: Any = {"tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}}
    for messages in (anthropic_client.messages, anthropic_client.beta.messages):
        says(TEXT)
        whole = await messages.create(**MESSAGE)
        assert whole.content[0].text == TEXT  # type: ignore[union-attr]
        async with messages.stream(**MESSAGE) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
        says('{"city": "Lund"}')
        assert (await messages.create(**MESSAGE, **forced)).content[0].type == "tool_use"
        async with messages.stream(**MESSAGE, **forced) as stream:
            assert (await stream.get_final_message()).content[0].type == "tool_use"
        assert (await messages.count_tokens(model=MODEL, messages=QUESTION, tools=[tool])).input_tokens
