"""An answer says the same whole and streamed, whatever the model writes; and what is no call is text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tools import FORMATS, TAGS, AnswerReader, Call, CallFormat, CallPart, CallReader, Thinking
from services.gateway.tools.forced import ForcedCalls, NamedCall
from tests.fuzzing import fuzzed
from tests.gateway.tools.test_parts import CALLS, SCHEMAS, WRITTEN

pytestmark = pytest.mark.fast

FORCED = {"required": ForcedCalls, "named": NamedCall}
KINDS: dict[str, type[CallFormat]] = {**FORMATS, **FORCED}
# What mutations put in: what could be mistaken for something else, and what breaks a call.
MARKS = [
    "<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=", "<parameter=n>",
    "</parameter>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "```", "<|tool_call|>", "<|/tool_call|>", "<|assistant|>", "f\n{",
    "<|start|>", "<|channel|>",
    "<|start|>assistant", "<|channel|>final", "<|channel|>analysis<|message|>", "<|message|>", "<|end|>", "<|call|>",
    "<|constrain|>", " to=functions.f",
    '{"name": "f", "arguments": {"city": Paris}}', '{"city": Paris}', "f(city=Paris)",
    "f(n=1, x)",
]  # fmt: skip
SMALL = ["\n", " ", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "a", "1", "é", "\\u12", "\\ud800"]
WORDS = st.sampled_from(["", "so: ", "see ", " tag here", "\n\n", "it's", *MARKS])


@dataclass
class Read:
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    parts: list[CallPart] = field(default_factory=list)


@st.composite
def written(draw: st.DrawFn, name: str) -> str:
    """Calls with text around them, some of it changed."""
    forms = [write for form, (kind, write) in WRITTEN.items() if kind is KINDS[name]] or [
        lambda _: '{"text": "a", "n": 1}'
    ]
    text = draw(WORDS)
    for _ in range(draw(st.integers(1, 2))):
        calls = draw(st.lists(st.sampled_from(CALLS), min_size=1, max_size=3))
        text += draw(st.sampled_from(forms))(calls) + draw(WORDS)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        gone = draw(st.sampled_from([0, 0, 1, 1, 5, 40]))
        text = text[:at] + draw(st.one_of(st.sampled_from(SMALL), st.sampled_from(MARKS))) + text[at + gone :]
    return text


def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=12))})
    return [text[begin:end] for begin, end in pairwise(places)]


def reader_of(name: str) -> CallFormat:
    return KINDS[name]({"f": SCHEMAS["f"]} if name == "named" else SCHEMAS)


def read(name: str, pieces: Sequence[str], thinks: bool = False, *, was_cut: bool = False) -> Read:
    thinking = Thinking(TAGS["think"], True, KINDS[name].ends_thinking) if thinks else None
    reader, found = AnswerReader(thinking, reader_of(name)), Read()
    for one in [*map(reader.feed, pieces), reader.finish(was_cut)]:
        found.text += one.text
        found.reasoning += one.reasoning
        found.calls += one.calls
        found.parts += one.parts
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_mutated_calls_say_the_same_whole_and_streamed(name: str) -> None:
    @fuzzed(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        text, thinks, was_cut = data.draw(written(name)), data.draw(st.booleans()), data.draw(st.booleans())
        text = text[: data.draw(st.integers(0, len(text)))] if was_cut or data.draw(st.booleans()) else text
        whole = read(name, [text], thinks, was_cut=was_cut)
        for pieces in (list(text), data.draw(st.composite(cut)(text))):  # type: ignore[arg-type]
            streamed = read(name, pieces, thinks, was_cut=was_cut)
            assert (streamed.text, streamed.reasoning) == (whole.text, whole.reasoning)
            assert streamed.calls == whole.calls
            for call in whole.calls:
                own = [part for part in streamed.parts if part.index == call.index]
                assert [part.name for part in own] == [call.name] + [""] * (len(own) - 1)
                assert "".join(part.arguments for part in own) == call.arguments
            begun = {part.index for part in streamed.parts} - {call.index for call in whole.calls}
            assert len(begun) <= 1 or name == "pythonic"  # one that was cut off, or a list of them
        said = [whole.text, whole.reasoning, *(one for call in whole.calls for one in (call.name, call.arguments))]
        json.dumps(said, ensure_ascii=False).encode()

    check()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, CallReader)])
def test_nothing_vanishes_but_calls(name: str) -> None:
    @fuzzed(60)
    @given(written(name))
    def check(text: str) -> None:
        reader = reader_of(name)
        assert isinstance(reader, CallReader)
        listed = name in ("mistral", "required", "granite", "phi4_mini")
        between = {*reader.closers, ",", "]"} if listed else {*reader.closers}
        between |= {"["} if name == "required" else set()
        gone = ""
        for character in text:
            before = reader._held + character
            pieces = reader.feed(character)
            calls = [piece for piece in pieces if isinstance(piece, Call)]
            shown = "".join(piece for piece in pieces if isinstance(piece, str))
            assert before.startswith(shown) or calls or name == "required"
            gone = before[: len(before) - len(reader._held)]
            if not calls and len(gone) > len(shown):
                assert gone.strip() in between or gone.replace(shown, "").strip("[], \n") == ""
        tail = reader._held
        rest = reader.finish()
        shown = "".join(piece for piece in rest if isinstance(piece, str))
        calls = [piece for piece in rest if isinstance(piece, Call)]
        if not calls and len(tail.strip()) > len(shown.strip()):  # neither call nor text
            lost = tail[len(shown) :].strip() if tail.startswith(shown) else tail
            assert any(mark.startswith(lost) for mark in between)

    check()


@pytest.mark.parametrize("end", ["", "."])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "see <tool_call> tag here"),
        ("hermes", '<tool_call>{"city": Paris}'),
        ("hermes", "<tool_call>{ this is no call"),
        ("hermes", '<tool_call>{"a": b and so on'),
        ("qwen3_coder", "see <tool_call> tag here"),
        ("qwen3_coder", "write <function=f> and then"),
        ("qwen3_coder", "<tool_call>\n<function=f>\nno parameter"),
        ("mistral", "see [TOOL_CALLS] tag here"),
        ("mistral", "[TOOL_CALLS]json {at all"),
        ("mistral", '[TOOL_CALLS] [{"bad": 1}] so'),
        ("llama3_json", "see <|python_tag|>print(1)"),
        ("pythonic", "<|python_start|>[it's a list"),
        ("pythonic", "[1, 2"),
        *(
            (name, f"it is {begin}")
            for name, kind in FORMATS.items()
            if issubclass(kind, CallReader)
            for begin in kind.begins
        ),
        ("hermes", '<tool_call>\n{"name": "get_weather"\n</tool_call> bye'),
        ("hermes", '<tool_call>\n{"name": "get_weather"'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": '),
        ("qwen3_coder", "<tool_call>\n<function=f>\n"),
        ("qwen3_coder", "<tool_call>\n<function=f"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"} bye'),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("llama3_json", '<|python_tag|>{"name": "f"'),
        ("llama3_json", '{"name": "f", "parameters": '),
        ("pythonic", "<|python_start|>[f("),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"),
        ("granite", '<|tool_call|>[{"name": "f"'),
        ("phi4_mini", '<|tool_call|>{"name": "f"'),
        ("glm4", "<|assistant|>f"),
        ("required", '{"name": "f"'),
        ("harmony", "<|channel|>commentary to=functions.f"),
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str, end: str) -> None:
    for pieces in ([text + end], list(text + end)):
        found = read(name, pieces)
        assert (found.text, found.calls, found.parts) == (text + end, [], [])


BAD = '<tool_call>\n{"name": "get_weather"\n</tool_call>'


def test_a_call_behind_a_broken_one_is_one() -> None:
    text = f'{BAD} then <tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>'
    for pieces in ([text], list(text)):
        found = read("hermes", pieces)
        assert (found.text, found.calls) == (f"{BAD} then", [Call("f", "{}")])


def test_a_broken_call_is_shown_where_it_is_closed() -> None:
    reader = reader_of("hermes")
    shown = [piece for character in f"{BAD} bye now" for piece in reader.feed(character) if isinstance(piece, str)]
    assert "".join(shown) == f"{BAD} bye now"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "it is <tool_call>"),
        ("hermes", BAD.removesuffix("</tool_call>")),
        ("qwen3_coder", "<tool_call>\n<function=f>\n"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("harmony", "<|channel|>commentary to=functions.f"),
    ],
)
def test_what_may_be_a_call_is_nothing_where_the_answer_was_cut(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = read(name, pieces, was_cut=True)
        assert (found.text, found.calls, found.parts) == ("it is " if text.startswith("it") else "", [], [])


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}\n</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}\n</tool_call> bye', " bye"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1} bye', "bye"),
        ("llama3_json", '{"name": "f", "parameters": {"n": 1}', ""),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}]', ""),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"n": 1}', ""),
        ("pythonic", "[f(n=1), f(n=", ", f(n="),
    ],
)
def test_a_call_whose_arguments_have_ended_is_one(name: str, text: str, rest: str) -> None:
    for pieces in ([text], list(text)):
        found = read(name, pieces)
        assert (found.text.strip(), found.calls) == (rest.strip(), [Call("f", '{"n": 1}')])


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("hermes", 'so <tool_call>{"name": "f", "arguments": {"n": 1', None),
        ("qwen3_coder", "<function=f>\n<parameter=n>\n1\n</parameter>\n", None),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "Par', None),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1', None),
        ("glm4", 'f\n{"n": 1', None),
        ("pythonic", "[f(n=1, text='a", None),
        ("named", '{"n": 1', None),
        ("harmony", '<|channel|>commentary to=functions.f <|message|>{"n": 1', '{"n": 1'),
    ],
)
def test_a_call_whose_arguments_have_not_ended_is_text(name: str, text: str, shown: str | None) -> None:
    for pieces in ([text], list(text)):
        found = read(name, pieces)
        assert (found.text, found.calls) == (shown or text, [])
        found = read(name, pieces, was_cut=True)
        assert (found.text, found.calls) == ("so " if text.startswith("so") else "", [])


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"city": Paris}}</tool_call>', Call("f", '{"city": Paris}')),
        ("llama3_json", '{"name": "f", "parameters": {"city": Paris}}', Call("f", '{"city": Paris}')),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"city": Paris}', Call("f", '{"city": Paris}')),
        ("named", '{"city": Paris}', Call("f", '{"city": Paris}')),
        ("pythonic", "[f(n=1, city=Paris)]", Call("f", '{"n": 1, city=Paris}')),
    ],
)
def test_a_begun_call_is_one_with_its_arguments_as_written(name: str, text: str, call: Call) -> None:
    for pieces in ([text], list(text)):
        found = read(name, pieces)
        assert (found.text, found.calls) == ("", [call])


@pytest.mark.long
@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]f" + " " * 100_000, "<function=" + "f" * 100_000, "<tool_call>" + "{ " * 50_000]
)
def test_what_goes_on_for_ever_is_text(text: str) -> None:
    for name in ("mistral", "qwen3_coder", "hermes"):
        assert read(name, [text[i : i + 4] for i in range(0, len(text), 4)] + ["!"]).text == text + "!"


def test_text_behind_a_broken_list_of_calls_is_shown() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"bad": 1}] so'
    assert [(found.text, len(found.calls)) for found in (read("mistral", [text]), read("mistral", list(text)))] == [
        (', {"bad": 1}] so', 1)
    ] * 2
