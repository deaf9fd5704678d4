"""Tools and thoughts over HTTP and gRPC: what workers are asked for, and what clients get of what the model writes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from grpc import aio
from openai import AsyncOpenAI

from services.gateway import Gateway
from services.gateway.errors import InvalidRequest
from services.gateway.generation.choice_text import ChoiceText
from services.gateway.text import Tokenizer
from services.gateway.tools import FORMATS, TAGS, detect_format, plan_reading, read_tools
from services.gateway.untrusted import ChatTemplate
from services.gateway.workers import Tokens
from tandem.sampling import SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc, worker_pb2
from tests.gateway.peers import MODEL, Peers

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.tool_call_id or '' }}\n{% endfor %}{% if think %}<think>\n{% endif %}"
)
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "today's", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time"}},
]
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Malmö"}}\n</tool_call>'


@pytest.fixture
def says(gateway: Gateway, peers: Peers, tokenizer: Tokenizer) -> Callable[[str], list[worker_pb2.SequenceSpec]]:
    """Make the model one that calls tools as Hermes does, and have it say this; returns what it is asked."""
    object.__setattr__(gateway.directory.llm_of(None).model, "chat_template", ChatTemplate(TEMPLATE, {}))
    object.__setattr__(gateway.directory.llm_of(None).model, "calls", FORMATS["hermes"])
    object.__setattr__(gateway.directory.llm_of(None).model, "thoughts", TAGS["think"])

    def say(text: str) -> list[worker_pb2.SequenceSpec]:
        seen: list[worker_pb2.SequenceSpec] = []
        ids = list(tokenizer.token_ids(text))

        def reply(spec: worker_pb2.SequenceSpec) -> list[int]:
            seen.append(spec)
            return ids

        peers.prefill.generator.reply = peers.decode.generator.reply = reply
        return seen

    return say


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_in(seen: list[worker_pb2.SequenceSpec], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(seen[0].token_ids, skip_special_tokens=False)


def answered(call: dict[str, Any], result: str) -> list[Any]:
    """Returns the messages of a chat whose earlier call has a result."""
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


async def test_a_call_whole_and_streamed(client: AsyncOpenAI, says: Any, tokenizer: Tokenizer) -> None:
    seen = says(f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}\n{CALL}")
    last: Any = None
    whole = await client.chat.completions.create(**ASKED)
    choice = whole.choices[0]
    assert whole.usage
    assert whole.usage.completion_tokens_details
    least, most = (len(tokenizer.token_ids(text)) for text in ("Where?", "<think>\nWhere?\n</think>\n"))
    assert least <= (whole.usage.completion_tokens_details.reasoning_tokens or 0) <= most
    assert prompt_in(seen, tokenizer).startswith("[weather][time]<user>hi")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert choice.message.reasoning == choice.message.reasoning_content == "Where?"  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Malmö"})
    ] * 2
    assert len({call.id for call in calls}) == 2
    text, thoughts, reason = "", "", None
    begun: list[Any] = []
    pieces: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(**ASKED, stream=True):
        (part,) = chunk.choices
        last = chunk.to_dict()
        text += part.delta.content or ""
        thoughts += getattr(part.delta, "reasoning_content", None) or ""
        reason = part.finish_reason or reason
        for call in part.delta.tool_calls or []:
            if call.id:
                begun.append((call.index, call.type, call.function.name))
            pieces.setdefault(call.index, []).append(call.function.arguments)
    assert (text, thoughts, reason) == ("Let me look.", "Where?", "tool_calls")
    assert last["choices"][0]["delta"] == {}
    assert begun == [(0, "function", "weather"), (1, "function", "weather")]
    assert ["".join(pieces[i]) for i in (0, 1)] == [call.function.arguments for call in calls]
    assert min(map(len, pieces.values())) > 3


@pytest.mark.parametrize("count", [2, 7, 1000])
def test_a_delta_has_one_entry_for_each_call(tokenizer: Tokenizer, count: int) -> None:
    """However many tokens come in one message."""
    plan = plan_reading(None, FORMATS["hermes"], read_tools(TOOLS, "auto", None), "")
    choice = ChoiceText(0, tokenizer, SamplingParams(), (), plan)
    ids = list(tokenizer.token_ids(f"{CALL}{CALL}"))
    said: dict[int, str] = {}
    for at in range(0, len(ids), count):
        delta = choice.feed(Tokens(ids[at : at + count], []), llm_pb2.FINISH_REASON_UNSPECIFIED)
        assert len({part.index for part in delta.call_parts}) == len(delta.call_parts)
        for part in delta.call_parts:
            said[part.index] = said.get(part.index, "") + part.name + part.arguments
    assert said == dict.fromkeys((0, 1), 'weather{"city": "Malmö"}')


async def test_one_call_where_they_may_not_be_parallel(client: AsyncOpenAI, says: Any) -> None:
    says(f"{CALL}{CALL}")
    answer = await client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


async def test_a_call_that_was_cut_off_is_none(client: AsyncOpenAI, says: Any) -> None:
    says(CALL)
    choice = (await client.chat.completions.create(**ASKED, max_tokens=20)).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, "")


@pytest.mark.parametrize(
    "text",
    [
        "it is <tool_call>",
        '<tool_call>\n{"name": "get_weather"\n</tool_call> bye',
        CALL.partition("mö")[0],
        "a </tool_c",
    ],
)
async def test_text_that_is_no_call_is_shown_where_the_model_ended_by_itself(
    client: AsyncOpenAI, says: Any, text: str
) -> None:
    says(text)
    choice = (await client.chat.completions.create(**ASKED)).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("stop", None, text)
    parts = [part.choices[0] async for part in await client.chat.completions.create(**ASKED, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == text
    assert parts[-1].finish_reason == "stop"


async def test_none_is_not_told_of_tools(client: AsyncOpenAI, says: Any, tokenizer: Tokenizer) -> None:
    seen = says(CALL)
    choice = (await client.chat.completions.create(**ASKED, tool_choice="none")).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert prompt_in(seen, tokenizer).startswith("<user>")


@pytest.mark.parametrize("think", [False, True])
async def test_required_and_named_calls_are_held_to_a_grammar(client: AsyncOpenAI, says: Any, think: bool) -> None:
    thoughts = "hm {\n</think>\n\n" if think else ""
    body = {**ASKED, "extra_body": {"chat_template_kwargs": {"think": think}}}
    seen = says(
        f'{thoughts}[{{"name": "weather", "arguments": {{"city": "A"}}}}, {{"name": "time", "arguments": {{}}}}]'
    )
    message = (await client.chat.completions.create(**body, tool_choice="required")).choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["weather", "time"]
    assert (message.content, getattr(message, "reasoning", None)) == (None, "hm {" if think else None)
    assert "call_1" in seen[0].sampling.grammar
    assert ("thoughts" in seen[0].sampling.grammar) is think
    seen = says(thoughts + '{"city": "A"}')
    named = {"type": "function", "function": {"name": "weather"}}
    message = (await client.chat.completions.create(**body, tool_choice=named)).choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        ("weather", '{"city": "A"}')
    ]
    assert "city" in seen[0].sampling.grammar
    assert ("thoughts" in seen[0].sampling.grammar) is think


async def test_strict_arguments_are_held_to_their_schema(client: AsyncOpenAI, says: Any) -> None:
    seen = says(f"so: {CALL}")
    function = {**TOOLS[0]["function"], "strict": True}  # type: ignore[dict-item]
    body = {**ASKED, "tools": [{"type": "function", "function": function}, TOOLS[1]]}
    message = (await client.chat.completions.create(**body)).choices[0].message
    assert (message.content, len(message.tool_calls or [])) == ("so:", 1)
    held, free = seen[0].sampling.grammar, says(CALL)
    assert '"required": ["city"]' in held or '"required":["city"]' in held
    await client.chat.completions.create(**ASKED)
    assert not free[0].sampling.grammar


async def test_results_go_back_into_the_prompt(client: AsyncOpenAI, says: Any, tokenizer: Tokenizer) -> None:
    seen = says("ok")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"A"}'}}
    await client.chat.completions.create(model=MODEL, messages=answered(call, "rain"))
    assert prompt_in(seen, tokenizer) == '<user>hi\n<assistant>weather{"city": "A"}\n<tool>rainc1\n'


async def test_thoughts_may_be_left_out(http: httpx.AsyncClient, says: Any) -> None:
    says("well</think>yes")
    body = {**ASKED, "include_reasoning": False, "chat_template_kwargs": {"think": True}}
    message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None}


async def test_over_grpc(gateway: Gateway, says: Any) -> None:
    says(f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}")
    asked = llm_pb2.GenerateRequest(
        model=MODEL,
        messages=llm_pb2.ChatMessages(messages=[llm_pb2.ChatMessage(role="user", content="hi")]),
        tools=[llm_pb2.Tool(name="weather", parameters=json.dumps(PLACE))],
    )
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        answer = await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked), timeout=10)
        parts = [part async for part in service.Generate(asked, timeout=10)]
    (choice,) = answer.choices
    assert (choice.text, choice.reasoning) == ("Let me look.", "Where?")
    assert choice.finish_reason == llm_pb2.FINISH_REASON_TOOL_CALLS
    assert [(call.name, json.loads(call.arguments)) for call in choice.tool_calls] == [("weather", {"city": "Malmö"})]
    assert "".join(part.reasoning for part in parts) == "Where?"
    (call,) = [call for part in parts for call in part.tool_calls]
    pieces = [piece for part in parts for piece in part.tool_call_parts]
    assert [(piece.id, piece.name) for piece in pieces if piece.id] == [(call.id, "weather")]
    assert "".join(piece.arguments for piece in pieces) == call.arguments
    assert len(pieces) > 3


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("Environment: ipython", "llama3_json"),
        ("plain", None),
    ],
)
def test_formats_are_found_in_templates(template: str, name: str | None) -> None:
    assert detect_format(template) == name


def test_a_model_without_a_format_is_refused_with_the_option_and_its_values() -> None:
    with pytest.raises(InvalidRequest, match=r"with --tool-parser and one of hermes, qwen3_coder, .*harmony, or let"):
        plan_reading(None, None, read_tools(TOOLS, "auto", None), "")


def test_special_tokens_that_mark_calls_are_shown(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer._vocabulary.special
    name = tokenizer._tokenizer.id_to_token(end)
    assert tokenizer.detokenizer().feed(end) == ""
    assert tokenizer.detokenizer(shown=[name]).feed(end) == name
