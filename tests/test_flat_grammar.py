"""Lark grammars within JSON: as a pattern they take what llguidance takes by the grammar itself, or are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tandem.grammar import InvalidGrammar, grammar_of
from tests.fuzzing import fuzzed

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | delete
add: "*** Add File: " name LF line+
delete: "*** Delete File: " name LF
name: /(.+)/
line: "+" /(.*)/ LF -> line
%import common.LF
"""
SUM = """
start: term (OP term)~1..2 ["!"]
?term: NUMBER | "x"i "a".."c"
OP: "+" | "-"   // two
%ignore /[ ]+/
%import common (NUMBER, INT)
"""
CASES = [
    (PATCH, ["*** Begin Patch\n*** Add File: a \"b\"\n+x\\y\n+\n*** Delete File: é\n*** End Patch"],
     ["", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n*** End Patch"]),
    (SUM, ["1+2", "1 + Xb - 2.5e-3 !", "xa+12"], ["1", "1+", "1+xd", "1+1+1+1"]),
    ('start: A{2} B{1,} C{,2}\nA: /a/i\nB: "\\x62" | "\\u00e9"\nC: /[^"\\\\]/', ["aAb", "aaéb.."], ["ab", "aab..."]),
]  # fmt: skip


def follows(kind: str, value: Any, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(kind, value), log_level=0)
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


def within(grammar: str) -> dict[str, Any]:
    text = {"type": "string", "x-lark": grammar}
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES)
def test_a_text_within_json_follows_its_grammar(grammar: str, right: list[str], wrong: list[str]) -> None:
    for text in (*right, *wrong):
        said = json.dumps({"input": text}, ensure_ascii=False)
        assert follows("json", within(grammar), said) is (text in right), text
        assert follows("grammar", grammar, text) is (text in right), text


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: "(" start? ")"', "start leads back to itself"),
        ('start: a\na: "x" | b\nb: a', "a leads back to itself"),
        ("start: nowhere", "there is no nowhere"),
        ("other: /x/", "there is no start"),
        ("start: %json {}", "in line 1 cannot be followed"),
        ("start: @x", "in line 1 cannot be followed"),
        ('start: "a', "in line 1 cannot be followed"),
        ('start: ("a"', "is not closed"),
        ('start: "a") "b"', "is out of place"),
        ('start: "ab".."c"', "a range goes from one character"),
        ('start: "a"~2000', "at most 1000"),
        ("%import common.NOTHING\nstart: NOTHING", "NOTHING is not in common"),
        ("\n".join([*(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), "start: r0", 'r40: "a"']), "more than 65536"),
        ("\n".join([*(f"r{i}: r{i + 1}" for i in range(5000)), "start: r0", 'r5000: "a"']), "nested so deeply"),
        ("start: " + "(" * 5000, "nested so deeply"),
    ],
)
def test_what_cannot_be_followed_is_refused(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=problem) as refused:
        grammar_of("json", within(grammar))
    assert len(refused.value.problem) < 200


def test_it_is_found_where_a_schema_names_it_and_nowhere_else() -> None:
    for schema in ({"const": {"type": "string", "x-lark": "a"}}, {"type": "object", "properties": {"x-lark": {}}}):
        grammar_of("json", schema)
    with pytest.raises(InvalidGrammar, match="exclude each other"):
        grammar_of("json", {"type": "string", "x-lark": "start: /a/", "pattern": "a"})
    tool = {"schema": within('start: "a"'), "strict": True, "place": "", "inside": True}
    calls = {"tools": {"f": tool}, "parallel": False}
    assert follows("calls", calls, '[{"name": "f", "arguments": {"input": "a"}}]')
    assert not follows("calls", calls, '[{"name": "f", "arguments": {"input": "b"}}]')


PIECES = st.sampled_from(
    ["start", "a", "B", ":", "|", "(", ")", "[", "]", "?", "*", "+", "~", "~2", "{1,2}", "{}", "..", '"x"', '""',
     '"\\', "/y/", "/(/", "/.*/", "//", "\n", " ", "->", "%ignore", "%import common.INT", "%import", "%json {}",
     "\ud800", "\0", "<[1]>"]
)  # fmt: skip


@fuzzed(100)
@given(st.sampled_from([case[0] for case in CASES]), st.lists(st.tuples(st.integers(0, 300), PIECES), max_size=6))
def test_any_grammar_is_followed_or_refused(grammar: str, pieces: list[tuple[int, str]]) -> None:
    for place, piece in pieces:
        grammar = grammar[:place] + piece + grammar[place + (place % 3) :]
    with suppress(InvalidGrammar):
        assert "x-lark" not in grammar_of("json", within(grammar))
