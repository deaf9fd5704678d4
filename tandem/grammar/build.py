"""Conversion of clients' formats to llguidance's grammars, and checks that llguidance accepts them.

All of it may recurse, explode or crash on a client's input: the gateway runs it in its helper process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from tandem.grammar.closed import closed
from tandem.grammar.depth import check_lark, check_schema
from tandem.grammar.errors import InvalidGrammar
from tandem.grammar.flat import pattern_of

# White space between the parts of JSON: a space, or a new line and its indentation.
WHITESPACE = r" ?|\n[ \t]{0,20}"
LARK = "x-lark"  # the keyword in a string's schema for the Lark grammar that the string follows
# A schema's `x-guidance` by which keywords that no grammar can express are ignored.
LENIENT: Mapping[str, Any] = {"lenient": True, "coerce_one_of": True}
LITERAL = ("const", "enum", "default", "examples")


def of_json_schema(schema: Any) -> str:
    """Returns the grammar of a JSON schema. Raises InvalidGrammar."""
    check_schema(schema)
    return LLMatcher.grammar_from_json_schema(_json(schema), overrides={"whitespace_pattern": WHITESPACE})


def of_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def of_choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def of_grammar(text: str) -> str:
    """Returns the grammar of a Lark text, or of llama.cpp's EBNF. Raises InvalidGrammar."""
    try:
        made = grammar_from("grammar", text)
    except (ValueError, AssertionError) as error:
        raise InvalidGrammar(str(error)) from None
    check_lark(made)
    return made


def of_tags(tags: Sequence[Mapping[str, Any]], triggers: Sequence[str]) -> str:
    """Returns a grammar of free text in which a trigger starts one of `tags`: its `begin`, JSON of its `schema`, its
    `end`. Raises InvalidGrammar.
    """
    made = []
    for i, tag in enumerate(tags):
        trigger = next((one for one in triggers if tag["begin"].startswith(one)), None)
        if not trigger:
            raise InvalidGrammar(f"no trigger begins {tag['begin']!r}")
        check_schema(tag["schema"], place=f".structures[{i}].schema")
        made.append(StructTag(trigger=trigger, begin=tag["begin"], grammar=_json(tag["schema"]), end=tag["end"]))
    if not made:
        raise InvalidGrammar("there are no structures")
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(made, assume_special=False))


def of_calls(schemas: Mapping[str, Mapping[str, Any]], most: int | None) -> str:
    """Returns a grammar of a JSON list of {"name": ..., "arguments": ...}, by `schemas`. `most`: None: one or more
    calls. Raises InvalidGrammar.
    """
    rules = ['start: "[" call (", " call)* "]"' if most is None else 'start: "[" call "]"']
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    for i, (name, schema) in enumerate(schemas.items()):
        check_schema(schema)
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules += [f'call_{i}: {begin} arguments_{i} "}}"', f"arguments_{i}: %json {_arguments(schema)}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def behind_thoughts(grammar: str, end: str | int) -> str:
    """Returns the grammar after thoughts: any text that ends with `end`, a text or a special token."""
    answer = _named(grammar)
    if isinstance(end, int):
        thoughts = f"start: thoughts <[{end}]> /\\s*/ @answer\nthoughts: /(.|\\n)*/\n"
    else:
        thoughts = f"start: thoughts /\\s*/ @answer\nthoughts[suffix={json.dumps(end)}]: /(.|\\n)*/\n"
    return json.dumps({**answer, "grammars": [{"lark_grammar": thoughts}, *answer["grammars"]]})


def behind_channels(grammar: str, marks: Mapping[str, str | int]) -> str:
    """Returns the grammar as gpt-oss' final message, with or without thoughts before.

    `marks`: its special tokens by name.
    """
    answer = _named(grammar)
    head = f'start: thoughts? {_mark(marks["channel"])} "final" {_mark(marks["message"])} @answer\n'
    return json.dumps({**answer, "grammars": [{"lark_grammar": head + _thoughts(marks)}, *answer["grammars"]]})


def of_channel_call(schemas: Mapping[str, Mapping[str, Any]], marks: Mapping[str, str | int]) -> str:
    """Returns a grammar of one call in gpt-oss' form, with or without thoughts before. The call ends the answer.

    Raises InvalidGrammar.
    """
    rules = ["start: thoughts? (" + " | ".join(f"call_{i}" for i in range(len(schemas))) + ")"]
    for i, (name, schema) in enumerate(schemas.items()):
        check_schema(schema)
        to = json.dumps(f"commentary to=functions.{name} ")
        head = f'{_mark(marks["channel"])} {to} {_mark(marks["constrain"])} "json" {_mark(marks["message"])}'
        rules += [f"call_{i}: {head} arguments_{i}", f"arguments_{i}: %json {_arguments(schema)}"]
    return LLMatcher.grammar_from_lark("\n".join(rules) + "\n" + _thoughts(marks))


def _arguments(schema: Mapping[str, Any]) -> str:
    lenient = LENIENT if schema.get("x-guidance") == LENIENT else {}
    return _json({**schema, "x-guidance": {**lenient, "whitespace_pattern": WHITESPACE}})


def _thoughts(marks: Mapping[str, str | int]) -> str:
    """Returns the rules of a message with thoughts and the beginning of the next message."""
    end, begin = marks["end"], f'{_mark(marks["channel"])} "analysis" {_mark(marks["message"])}'
    next_one = f'{_mark(marks["start"])} "assistant"'
    if isinstance(end, int):
        return f"thoughts: {begin} thought <[{end}]> {next_one}\nthought: /(.|\\n)*/\n"
    return f"thoughts: {begin} thought {next_one}\nthought[suffix={json.dumps(end)}]: /(.|\\n)*/\n"


def _mark(mark: str | int) -> str:
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark)


def _named(grammar: str) -> dict[str, Any]:
    """Returns a grammar's JSON whose first grammar is named `@answer`."""
    answer: dict[str, Any] = (
        json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    )
    answer["grammars"][0]["name"] = "answer"
    return answer


def check(grammar: str) -> None:
    """Checks a grammar's syntax and size. Raises InvalidGrammar."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if failed:
        raise InvalidGrammar(" ".join(messages[0].split()))


def check_begin(grammar: str) -> None:
    """Compiles a grammar as workers do, but with bytes as tokens, and begins an answer.

    Raises:
        InvalidGrammar: the grammar cannot be compiled, or allows no answer to begin.
    """
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits())
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error() and not matcher.is_accepting():
        raise InvalidGrammar("no answer can follow it: it refers to itself before anything is said, or excludes all")
    first = next((byte for byte in range(min(256, 8 * len(mask))) if mask[byte // 8] >> byte % 8 & 1), None)
    if first is not None and not matcher.consume_tokens([first]):
        raise InvalidGrammar(f"is too large to be followed: {matcher.get_error().splitlines()[0]}")


def limits() -> LLParserLimits:
    """Returns the bounds of a grammar's size, and of each parser step's work: a fifth of llguidance's defaults."""
    return LLParserLimits(
        max_grammar_size=100_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=20_000,
        max_lexer_states=50_000, max_items_in_row=1_000,
    )  # fmt: skip


def _json(schema: Any) -> str:
    """Returns a schema's text for grammars, with its objects closed."""
    schema = closed(schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError:
        raise InvalidGrammar("a number in it is none that JSON has: too large, or not a number") from None
    return json.dumps(_with_patterns(schema)) if f'"{LARK}"' in text else text


def _with_patterns(schema: Any) -> Any:
    """Returns a schema in which strings that follow a Lark grammar have a pattern instead."""
    if isinstance(schema, list):
        return [_with_patterns(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: part if key in LITERAL else _with_patterns(part) for key, part in schema.items()}
    if schema.get("type") == "string" and isinstance(schema.get(LARK), str):
        if "pattern" in made:
            raise InvalidGrammar(f"{LARK} and pattern exclude each other")
        made["pattern"] = pattern_of(made.pop(LARK))
    return made
