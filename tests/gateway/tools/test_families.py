"""Each family's chat by its own template: what the model is shown, and what every door makes of what it writes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers
from openai import AsyncOpenAI

from services.gateway import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.text import Tokenizer
from services.gateway.tools import FORMATS, TAGS, detect_format, detect_tags
from services.gateway.untrusted import ChatTemplate, TemplateOptions, TemplateRefused
from tandem.grammar import Grammars
from tandem.registry import Registry
from tandem.v1 import worker_pb2
from tests.gateway.peers import MODEL, Peers, peers_on
from tests.gateway.test_messages_fields import anthropic
from tests.gateway.tiny_model import EOS, write_model
from tests.gateway.tools import templates
from tests.gateway.tools.test_calls import PLACE, TOOLS

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

__all__ = ["anthropic"]  # a fixture
CONTEXT = 4096
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
FOUND = {
    templates.HARMONY: ("harmony", "harmony"),
    templates.DEEPSEEK_V3: ("deepseek", "think"),
    templates.DEEPSEEK_V31: ("deepseek", "think"),
    templates.GLM4: ("glm4", None),
    templates.GLM4_CHAT: ("glm4", None),
    templates.GRANITE: ("granite", "granite"),
    templates.PHI4_MINI: ("phi4_mini", None),
    templates.SMOLLM3: ("hermes", "think"),
}
CALLS = [
    {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    for id_, name, arguments in (("a", "weather", {"city": "Malmö"}), ("b", "time", {}))
]
HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": CALLS},
    {"role": "tool", "content": "rain", "tool_call_id": "a"},
    {"role": "tool", "content": "noon", "tool_call_id": "b"},
]
AS_JSON = '{"name": "weather", "arguments": {"city": "Malmö"}}', '{"name": "time", "arguments": {}}'


@pytest.mark.fast
@pytest.mark.parametrize("template", FOUND)
def test_a_template_shows_its_formats(template: str) -> None:
    assert (detect_format(template), detect_tags(template)) == FOUND[template]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (
            templates.HARMONY,
            "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
            '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Malmö"}<|call|>'
            '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
            "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>"
            '<|start|>functions.time to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant',
        ),
        (
            templates.DEEPSEEK_V3,
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Malmö"}\n```<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            templates.DEEPSEEK_V31,
            '</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Malmö"}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            templates.GLM4,
            'hi<|assistant|>weather\n{"city": "Malmö"}<|assistant|>time\n{}<|observation|>\nrain<|observation|>\nnoon',
        ),
        (
            templates.GLM4_CHAT,
            'hi<|assistant|>weather\n{"city": "Malmö"}<|assistant|>time\n{}<|observation|>\nrain<|observation|>\nnoon',
        ),
        (
            templates.GRANITE,
            f"assistant<|end_of_role|><|tool_call|>[{', '.join(AS_JSON)}]<|end_of_text|>\n"
            "<|start_of_role|>tool_response<|end_of_role|>rain<|end_of_text|>\n",
        ),
        (
            templates.PHI4_MINI,
            f"<|assistant|><|tool_call|>[{', '.join(AS_JSON)}]<|/tool_call|><|end|><|tool_response|>rain<|end|>",
        ),
        (
            templates.SMOLLM3,
            f"assistant\n<tool_call>\n{AS_JSON[0]}\n</tool_call>\n<tool_call>\n{AS_JSON[1]}\n</tool_call><|im_end|>\n"
            "<|im_start|>user\nrain<|im_end|>\n",
        ),
    ],
)
def test_a_template_is_given_calls_and_results_as_it_reads_them(template: str, shown: str) -> None:
    made = ChatTemplate(template, {"bos_token": ""})
    prompt = made.render(HISTORY, TemplateOptions(tools=TOOLS))
    assert shown in prompt
    for tool in TOOLS:
        assert tool["function"]["name"] in prompt[: prompt.index("hi")]  # type: ignore[index]
    with_text = [HISTORY[0], {**HISTORY[1], "content": "Look."}, *HISTORY[2:]]
    assert ("Look." in made.render(with_text)) is (template is not templates.HARMONY)
    without_calls = [HISTORY[0], {"role": "assistant", "content": "Yes."}, HISTORY[0]]
    assert "Yes." in made.render(without_calls)


@pytest.mark.fast
@pytest.mark.parametrize("word", ["metadata", "<tool_call>", "<|tool_call|>", "observation"])
def test_a_template_that_shows_calls_itself_is_given_them(word: str) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %} {{ c.function.arguments.city }}{% endfor %}\n"
    )
    prompt = ChatTemplate(source + "{% endfor %}" + word, {}).render(HISTORY, TemplateOptions(tools=TOOLS))
    assert prompt == "userassistant Malmö tooltool" + word


@pytest.mark.fast
@pytest.mark.parametrize("effort", ["none", "low", "medium", "high", "max"])
def test_an_effort_is_one_that_gpt_oss_knows(effort: str) -> None:
    prompt = ChatTemplate(templates.HARMONY, {}).render(
        HISTORY[:1], TemplateOptions(variables={"reasoning_effort": effort})
    )
    assert f"Reasoning: {({'none': 'low', 'max': 'high'}).get(effort, effort)}\n" in prompt


@pytest.mark.fast
@pytest.mark.parametrize("effort", [["low"], {"a": 1}, 7])
def test_a_strange_effort_is_no_fault_of_ours(effort: Any) -> None:
    template = ChatTemplate("{{ '<|channel|>' + reasoning_effort }}", {})
    with pytest.raises(TemplateRefused):
        template.render(HISTORY[:1], TemplateOptions(variables={"reasoning_effort": effort}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its words have gpt-oss' marks as special tokens; a call ends an answer, the end of a message does not."""
    folder = write_model(tmp_path_factory.mktemp("model"), CONTEXT)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        file.write_text(file.read_text(encoding="utf-8").replace(EOS, "<|endoftext|>"), encoding="utf-8")
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens(list(MARKS))
    words.save(str(folder / "tokenizer.json"))
    ends = [0, *(words.token_to_id(mark) for mark in ("<|return|>", "<|call|>"))]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
async def peers(settings: GatewaySettings, folder: Path) -> AsyncIterator[Peers]:
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    async with peers_on(registry, lambda spec: []) as peers:
        peers.max_model_len, peers.folder = CONTEXT, folder
        await peers.add_decode(num_blocks=CONTEXT)
        await peers.add_prefill()
        yield peers


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


Says = Callable[[str, str], list[worker_pb2.SequenceSpec]]


@pytest.fixture
def says(gateway: Gateway, peers: Peers, tokenizer: Tokenizer) -> Says:
    """Make the model one of this template, and have it say this; returns what it is asked."""
    peers.decode.step_s = 0.0

    def say(template: str, text: str) -> list[worker_pb2.SequenceSpec]:
        model = gateway.directory.llm_of(None).model
        object.__setattr__(model, "chat_template", ChatTemplate(template, {"bos_token": ""}))
        object.__setattr__(model, "calls", FORMATS.get(detect_format(template) or ""))
        object.__setattr__(model, "thoughts", TAGS.get(detect_tags(template) or ""))
        seen: list[worker_pb2.SequenceSpec] = []
        ids = list(tokenizer.token_ids(text))

        def reply(spec: worker_pb2.SequenceSpec) -> list[int]:
            seen.append(spec)
            return ids

        peers.prefill.generator.reply = peers.decode.generator.reply = reply
        return seen

    return say


Said = tuple[str, str, list[tuple[str, Any]]]
HI: list[Any] = [{"role": "user", "content": "hi"}]
ANTHROPIC = [{"name": t["function"]["name"], "input_schema": t["function"].get("parameters", {})} for t in TOOLS]  # type: ignore[attr-defined,index]
OF_RESPONSES = [{"type": "function", "strict": False, **t["function"]} for t in TOOLS]  # type: ignore[dict-item]


async def by_chat(client: AsyncOpenAI, tools: Any = TOOLS) -> Said:
    message = (await client.chat.completions.create(model=MODEL, messages=HI, tools=tools)).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    return message.content or "", getattr(message, "reasoning_content", ""), calls


async def by_stream(client: AsyncOpenAI) -> Said:
    text = thoughts = ""
    calls: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        text, thoughts = text + (delta.content or ""), thoughts + (getattr(delta, "reasoning_content", None) or "")
        for call in delta.tool_calls or []:
            assert call.function
            name, arguments = calls.setdefault(call.index, ["", ""])
            calls[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
    return text, thoughts, [(name, json.loads(arguments)) for name, arguments in calls.values()]


async def by_responses(client: AsyncOpenAI, streamed: bool) -> Said:
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": OF_RESPONSES}
    if streamed:
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        answer = events[-1].response
    else:
        answer = await client.responses.create(**asked)
    thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.content or []]
    calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
    return answer.output_text, "".join(thoughts), calls


async def by_messages(client: AsyncAnthropic, streamed: bool) -> Said:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "messages": HI, "tools": ANTHROPIC}
    if streamed:
        async with client.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
    else:
        message = await client.messages.create(**asked)
    of = {kind: [block for block in message.content if block.type == kind] for kind in ("text", "thinking", "tool_use")}
    texts = ("".join(getattr(block, kind) for block in of[kind]) for kind in ("text", "thinking"))
    return *texts, [(block.name, block.input) for block in of["tool_use"]]  # type: ignore[return-value]


WEATHER, BOTH = ("weather", {"city": "Malmö"}), [("weather", {"city": "Malmö"}), ("time", {})]
ANSWERS: Sequence[tuple[str, str, Said]] = [
    (
        templates.HARMONY,
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Malmö"}<|end|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}',
        ("Let me look.", "Where?", BOTH),
    ),
    (
        templates.HARMONY,
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Yes, <|channel|> it.",
        ("Yes, <|channel|> it.", "Easy.", []),
    ),
    (
        templates.DEEPSEEK_V3,
        "Where?\n</think>\n\nLet me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Malmö"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Let me look.", "Where?", BOTH),
    ),
    (
        templates.DEEPSEEK_V31,
        'Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Malmö"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Look.", "", BOTH),
    ),
    (templates.GLM4, '\nweather\n{"city": "Malmö"}<|assistant|>time\n{}', ("", "", BOTH)),
    (templates.GLM4, 'Look.<|assistant|>weather\n{"city": "Malmö"}', ("Look.", "", [WEATHER])),
    (
        templates.GRANITE,
        f"<think>Where?</think><response>Look.</response><|tool_call|>[{', '.join(AS_JSON)}]",
        ("Look.</response>", "Where?", BOTH),
    ),
    (templates.GRANITE, "<think>Easy.</think>\n<response>Yes.</response>\n", ("Yes.", "Easy.", [])),
    (templates.GRANITE, f"<|tool_call|>[{', '.join(AS_JSON)}]", ("", "", BOTH)),
    (templates.PHI4_MINI, f"<|tool_call|>[{', '.join(AS_JSON)}]<|/tool_call|>", ("", "", BOTH)),
    (
        templates.SMOLLM3,
        f"<think>Where?</think>\n<tool_call>\n{AS_JSON[0]}\n</tool_call>\n<tool_call>{AS_JSON[1]}</tool_call>",
        ("", "Where?", BOTH),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("template", "text", "said"), ANSWERS)
async def test_every_door_says_the_same(
    client: AsyncOpenAI, anthropic: AsyncAnthropic, says: Says, template: str, text: str, said: Said
) -> None:
    says(template, text)
    assert await by_chat(client) == said
    assert await by_stream(client) == said
    for streamed in (False, True):
        assert await by_responses(client, streamed) == said
        assert await by_messages(anthropic, streamed) == said


@pytest.mark.parametrize(
    ("template", "text", "shown"),
    [
        (templates.HARMONY, "Hello <|channel|> you", "Hello <|channel|> you"),
        (templates.HARMONY, "<|channel|>commentary to=functions.weather<|message|>not JSON", "not JSON"),
        (templates.HARMONY, "<|channel|>comment<|message|>so", "so"),
        (templates.HARMONY, '<|channel|>final {"a": 1}', ' {"a": 1}'),
        (templates.DEEPSEEK_V31, "see <｜tool▁calls▁begin｜>weather", "see <｜tool▁calls▁begin｜>weather"),
        (templates.GLM4, "weather\nis fine", "weather\nis fine"),
        (templates.GLM4, "nobody\n{}", "nobody\n{}"),
        (templates.GRANITE, '<|tool_call|>[{"bad": 1}]', '<|tool_call|>[{"bad": 1}]'),
        (templates.PHI4_MINI, "see <|tool_call|> tag", "see <|tool_call|> tag"),
    ],
)
async def test_what_is_no_call_is_text(client: AsyncOpenAI, says: Says, template: str, text: str, shown: str) -> None:
    says(template, text)
    assert await by_chat(client) == (shown, "", [])
    assert await by_stream(client) == (shown, "", [])


async def test_gpt_oss_without_tools_is_read_all_the_same(client: AsyncOpenAI, says: Says) -> None:
    says(templates.HARMONY, ANSWERS[1][1])
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Yes, <|channel|> it."
    assert answer.usage
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens


async def test_an_answer_that_gpt_oss_goes_on_with_is_no_header(http: httpx.AsyncClient, says: Says) -> None:
    seen = says(templates.HARMONY, " and so on")
    body = {
        "model": MODEL, "messages": [*HI, {"role": "assistant", "content": "One"}],
        "continue_final_message": True, "add_generation_prompt": False, "response_format": {"type": "json_object"},
    }  # fmt: skip
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == " and so on"
    assert "final" not in seen[0].sampling.grammar


HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>so {<|end|><|start|>assistant"


async def test_gpt_oss_is_held_to_calls_in_its_own_format(
    client: AsyncOpenAI, says: Says, folder: Path, tokenizer: Tokenizer
) -> None:
    grammars = Grammars(folder, tokenizer.vocab_size)

    def wrong(grammar: str, text: str) -> str:
        return grammars.start(grammar).follow(tokenizer.token_ids(text))

    assert [type(tokenizer.mark(mark)) for mark in MARKS] == [int] * len(MARKS)

    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        seen = says(templates.HARMONY, THOUGHT + HEAD + '{"city": "Malmö"}<|call|>')
        answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Malmö"}')
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        grammar = seen[0].sampling.grammar
        assert not wrong(grammar, HEAD + '{"city": "Malmö"}')
        assert not wrong(grammar, THOUGHT + HEAD + '{"city": "Malmö"}')
        assert wrong(grammar, HEAD + '{"town": "Malmö"}')
        assert wrong(grammar, "<|channel|>final<|message|>No.")
        assert bool(wrong(grammar, HEAD.replace("weather", "time") + "{}")) is (choice != "required")


async def test_gpt_oss_answers_in_a_form_behind_its_thoughts(
    client: AsyncOpenAI, says: Says, folder: Path, tokenizer: Tokenizer
) -> None:
    seen = says(templates.HARMONY, THOUGHT + '<|channel|>final<|message|>{"city": "Malmö"}')
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    answer = await client.chat.completions.create(model=MODEL, messages=HI, response_format=form)
    assert answer.choices[0].message.content == '{"city": "Malmö"}'
    guide = Grammars(folder, tokenizer.vocab_size)
    grammar = seen[0].sampling.grammar
    for text, good in (
        ('<|channel|>final<|message|>{"city": "Malmö"}', True),
        (THOUGHT + '<|channel|>final<|message|>{"city": "Malmö"}', True),
        ('{"city": "Malmö"}', False),
        ("<|channel|>final<|message|>Malmö", False),
    ):
        assert (guide.start(grammar).follow(tokenizer.token_ids(text)) == "") is good, text
