"""Calls in parts, as they are written: put together they are the whole call, wherever the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from services.gateway.tools import FORMATS, Call, CallFormat, CallPart
from services.gateway.tools.forced import ForcedCalls, NamedCall

pytestmark = pytest.mark.fast

Said = Sequence[tuple[str, Mapping[str, Any]]]
SCHEMAS = {
    "f": {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}},
    "g": {"properties": {}},
}
CALLS: Said = [
    ("f", {"text": 'a "quoted" \\ <parameter=x> line\nand </parameter> [{(', "n": -3, "deep": {"k": [1, None, {}]}}),
    ("g", {}),
    ("f", {"text": "", "deep": {"a": "]}"}, "n": 0}),
    ("f", {"n": 12}),
]  # fmt: skip


def as_json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, indent=1)


def tagged(name: str, arguments: Mapping[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def fenced(name: str, arguments: Mapping[str, Any]) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
    )


def plain(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"


def channelled(name: str, arguments: Mapping[str, Any]) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(arguments)}<|call|>"


WRITTEN: dict[str, tuple[type[CallFormat], Callable[[Said], str]]] = {
    "hermes": (FORMATS["hermes"], lambda calls: "\n".join(f"<tool_call>{as_json(*c)}</tool_call>" for c in calls)),
    "llama3_json": (FORMATS["llama3_json"], lambda calls: as_json(*calls[0])),
    "mistral": (FORMATS["mistral"], lambda calls: f"[TOOL_CALLS] [{', '.join(as_json(*c) for c in calls)}]"),
    "mistral 11": (
        FORMATS["mistral"], lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    ),
    "qwen3_coder": (FORMATS["qwen3_coder"], lambda calls: "\n".join(tagged(*c) for c in calls)),
    "pythonic": (FORMATS["pythonic"], lambda calls: f"[{', '.join(python(*c) for c in calls)}]"),
    "deepseek": (
        FORMATS["deepseek"],
        lambda calls: f"<｜tool▁calls▁begin｜>{chr(10).join(fenced(*c) for c in calls)}<｜tool▁calls▁end｜>",
    ),
    "deepseek 3.1": (
        FORMATS["deepseek"],
        lambda calls: f"<｜tool▁calls▁begin｜>{''.join(plain(*c) for c in calls)}<｜tool▁calls▁end｜>",
    ),
    "granite": (FORMATS["granite"], lambda calls: f"<|tool_call|>[{', '.join(as_json(*c) for c in calls)}]"),
    "phi4_mini": (
        FORMATS["phi4_mini"],
        lambda calls: f"<|tool_call|>[{', '.join(as_json(*c) for c in calls)}]<|/tool_call|>",
    ),
    "phi4_mini alone": (
        FORMATS["phi4_mini"], lambda calls: "".join(f"<|tool_call|>{as_json(*c)}<|/tool_call|>" for c in calls)
    ),
    "glm4": (
        FORMATS["glm4"], lambda calls: "<|assistant|>".join(f"{n}\n{json.dumps(a)}" for n, a in calls)
    ),
    "glm4 in lines": (FORMATS["glm4"], lambda calls: "\n".join(f"{n}\n{json.dumps(a)}" for n, a in calls)),
    "harmony": (FORMATS["harmony"], lambda calls: "<|start|>assistant".join(channelled(*c) for c in calls)),
    "required": (ForcedCalls, lambda calls: f"[{', '.join(as_json(*c) for c in calls)}]"),
}  # fmt: skip


def read(
    reader: CallFormat, pieces: Sequence[str], *, was_cut: bool = False
) -> tuple[list[Call], list[list[CallPart]]]:
    """All calls, and the parts that each piece has brought."""
    calls, parts = [], []
    for said in [*map(reader.feed, pieces), reader.finish(was_cut)]:
        calls += [piece for piece in said if isinstance(piece, Call)]
        parts.append([piece for piece in said if isinstance(piece, CallPart)])
        assert not [piece for piece in said if isinstance(piece, str) and piece.strip()]
    return calls, parts


def cut(text: str, seed: int) -> list[str]:
    """Every character alone; or pieces of random lengths."""
    if seed == 0:
        return list(text)
    chosen, at, pieces = random.Random(seed), 0, []
    while at < len(text):
        pieces.append(text[at : (at := at + chosen.randint(1, 3 * seed))])
    return pieces


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(6))
def test_the_parts_are_the_call(name: str, seed: int) -> None:
    kind, write = WRITTEN[name]
    expected = CALLS[:1] if name == "llama3_json" else CALLS
    calls, parts = read(kind(SCHEMAS), cut(write(expected), seed))
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [(n, dict(a)) for n, a in expected]
    whole, _ = read(kind(SCHEMAS), [write(expected)])
    assert [call.arguments for call in whole] == [call.arguments for call in calls]
    flat = [part for some in parts for part in some]
    for call in calls:
        assert "".join(part.arguments for part in flat if part.index == call.index) == call.arguments
    assert [(part.index, part.name) for part in flat if part.name] == [(c.index, c.name) for c in calls]
    if seed == 0:
        assert len([some for some in parts if some]) > (4 if name == "pythonic" else 20)


def test_a_named_call() -> None:
    arguments = json.dumps(CALLS[0][1], indent=2)
    (call,), parts = read(NamedCall({"f": SCHEMAS["f"]}), list(arguments))
    assert call == Call("f", arguments)
    assert [part.arguments for some in parts for part in some] == list(arguments)


def test_strings_with_line_ends_in_them_become_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"text": "one\ntwo\t3",\n "n": 1}}</tool_call>'
    (call,), _ = read(FORMATS["hermes"](SCHEMAS), list(text))
    assert json.loads(call.arguments) == {"text": "one\ntwo\t3", "n": 1}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "pythonic"])
def test_a_call_that_is_cut_off_has_parts_and_is_none(name: str) -> None:
    kind, write = WRITTEN[name]
    text = write(CALLS[:1])
    calls, parts = read(kind(SCHEMAS), list(text[: text.index("quoted") + 40]), was_cut=True)
    assert not calls
    begun = "".join(part.arguments for some in parts for part in some)
    assert begun.startswith('{"text": "a ') or begun.startswith('{\n  "text": "a ')


def test_one_whose_arguments_come_first_comes_whole() -> None:
    text = '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>'
    (call,), parts = read(FORMATS["hermes"](SCHEMAS), list(text))
    assert call == Call("f", '{"n": 1}')
    assert [part.arguments for some in parts for part in some] == ['{"n": 1}']
