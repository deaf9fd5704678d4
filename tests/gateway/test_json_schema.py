"""JSON schemas as grammars: what is taken is valid, and what grammars cannot follow is refused with its place.

In the style of the JSON-Schema-Test-Suite, which `python -m benchmarks.json_schema_suite` goes through whole.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from benchmarks.json_schema_suite import takes
from tandem.grammar import InvalidGrammar, grammar_of

pytestmark = pytest.mark.fast

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "leaves": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}
ONE_OF = {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}
# A schema, values that are valid and taken, values that are not valid.
FOLLOWED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -7], [1.5, "1", None, True]),
    ({"type": ["string", "null"]}, ["x", None], [1, False]),
    ({"type": "boolean"}, [True], [0, "true", None]),
    ({"enum": ["a", 1, None, {"k": []}]}, ["a", 1, None, {"k": []}], ["b", 2, False, {}]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "🦊ab"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["", "abd"]),
    ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.1"], ["10.0.0", "256.1.1.1"]),
    ({"type": "number", "minimum": 1.5, "maximum": 2}, [1.5, 2, 1.75], [1.4, 3, -2]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12}, [4, 11], [3, 12, -5]),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20}, [0, 15], [3, 25]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None], {}]),
    ({"type": "array", "items": {}, "minItems": 1, "maxItems": 2}, [[1], [1, "a"]], [[], [1, 2, 3]]),
    ({"prefixItems": [{"type": "integer"}], "items": False, "type": "array"}, [[], [1]], [["a"], [1, 2]]),
    ({"type": "object"}, [{}, {"a": {"b": 1}}], [[], None]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        [{"a": 1}],
        [{}, {"a": "1"}, {"b": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "1"}]),
    (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{"n_a": 1}],
        [{"n_a": "1"}, {"m": 1}],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 1, "properties": {}}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
    ({"anyOf": [{"type": "integer", "minimum": 2}, {"type": "string"}]}, [2, "x"], [1, None]),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
    (ONE_OF, ["ab", 3], ["abc", 1.5]),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, [None], [1]),
    (TREE, [{"name": "a"}, {"name": "a", "leaves": [{"name": "b"}]}], [{}, {"name": "a", "leaves": [1]}]),
    ({"properties": {"a": {"type": "integer"}}, "type": ["object", "array"]}, [{"a": 1}, [1]], [{"a": "x"}, 1]),
    ({"type": "object", "properties": {"a": False}}, [{}], [{"a": 1}]),
    ({"title": "t", "description": "d", "default": 1, "examples": [2], "type": "integer"}, [1], ["1"]),
]  # fmt: skip
X = {"properties": {"a": {}, "x": {"properties": {"n": {}}}}, "required": ["a"]}
Y = {"properties": {"b": {}, "x": {"properties": {"m": {}}}}, "required": ["b"]}
REF = {"$ref": "#/$defs/x"}
# A schema that closes no object by itself, values that are taken, and valid values that are not.
CLOSED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "object", "properties": {"a": {}}}, [{}, {"a": 1}], [{"a": 1, "b": 2}, {"b": 2}]),
    ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    ({"type": "array", "items": X}, [[{"a": 1, "x": {"n": 1}}]], [[{"a": 1, "b": 1}], [{"a": 1, "x": {"m": 1}}]]),
    ({"anyOf": [X, Y]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({**REF, "$defs": {"x": X}}, [{"a": 1}], [{"a": 1, "b": 1}]),
    ({"properties": {"x": {"allOf": [REF], "description": "d"}}, "$defs": {"x": X}}, [{"x": {"a": 1}}], [{"y": 1}]),
    ({**X, "anyOf": [{"required": ["a"]}, {"required": ["x"]}]}, [{"a": 1}], [{"a": 1, "b": 1}]),
    # What names properties elsewhere, or asks for others, stays open.
    ({"type": "object"}, [{}, {"a": 1}], []),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, [{"a": 1, "b": 2}], []),
    ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}, "type": "object"}, [{"b": None}], []),
    ({"properties": {"a": {}}, "patternProperties": {"^n_": {}}, "type": "object"}, [{"a": 1, "n_b": 2}], []),
    ({"properties": {"a": {}}, "required": ["b"], "type": "object"}, [{"a": 1, "b": 2}], []),
    ({"allOf": [X, Y]}, [{"a": 1, "x": {"n": 1, "m": 1}, "b": 1}], []),
    ({**X, **REF, "$defs": {"x": Y}}, [{"a": 1, "x": {"n": 1, "m": 1}, "b": 1}], []),
    ({**X, "anyOf": [Y, {"required": ["a"]}]}, [{"a": 1, "x": {"n": 1, "m": 1}, "b": 1}], []),
    ({"const": {"properties": {"a": {}}}}, [{"properties": {"a": {}}}], []),
    ({"enum": [{"properties": {"a": {}}}]}, [{"properties": {"a": {}}}], []),
]
# A schema that says more than a grammar can follow, where, and what.
REFUSED: list[tuple[Any, str, str]] = [
    ({"not": {"type": "string"}}, "", "not"),
    ({"type": "array", "uniqueItems": True}, "", "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "", "contains"),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}}, "", "then"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "", "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "", "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "", "dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "", "unevaluatedProperties"),
    ({"type": "array", "unevaluatedItems": False}, "", "unevaluatedItems"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "", "oneOf"),
    ({"$ref": "http://example.com/elsewhere.json"}, "", "elsewhere"),
    ({"$ref": "#/$defs/none"}, "", "none"),
    ({"properties": {"a": {"type": "string", "format": "iri"}}}, ".properties.a", "iri"),
    ({"properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items", "not"),
    ({"anyOf": [{}, {"allOf": [{"uniqueItems": True}]}]}, ".anyOf[1].allOf[0]", "uniqueItems"),
    ({"$defs": {"x": {"$id": "a", "$ref": "b"}}, "$ref": "#/$defs/x"}, ".$defs.x", "$id beside $ref"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "", ""),
]


def made(schema: Any) -> str:
    return grammar_of("json", schema)


@pytest.mark.parametrize(("schema", "valid", "invalid"), FOLLOWED, ids=lambda value: str(value)[:40])
def test_what_is_taken_is_valid(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    grammar = made(schema)
    judge = Draft202012Validator(schema, format_checker=FormatChecker())
    assert [judge.is_valid(value) for value in valid + invalid] == [True] * len(valid) + [False] * len(invalid)
    for value in valid:
        assert takes(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        assert not takes(grammar, json.dumps(value)), value
    for cut in ("", '{"', "[", '"'):
        assert not takes(grammar, cut)


@pytest.mark.parametrize(("schema", "taken", "closed_out"), CLOSED, ids=lambda value: str(value)[:40])
def test_objects_have_the_properties_that_are_named(schema: Any, taken: list[Any], closed_out: list[Any]) -> None:
    judge, before = Draft202012Validator(schema), json.dumps(schema)
    assert all(map(judge.is_valid, taken + closed_out))
    grammar = made(schema)
    for value in taken:
        assert takes(grammar, json.dumps(value)), value
    for value in closed_out:
        assert not takes(grammar, json.dumps(value)), value
    assert json.dumps(schema) == before


@pytest.mark.parametrize(("schema", "place", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_followed_is_refused_with_its_place(schema: Any, place: str, words: str) -> None:
    with pytest.raises(InvalidGrammar) as refused:
        made(schema)
    assert refused.value.place == place
    assert words in refused.value.problem


def test_calls_whose_schemas_are_too_large_together_hold_no_arguments() -> None:
    """They hold those of tools that are strict, or there is no grammar."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    small = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools: dict[str, Any] = {
        f"f{i}": {"schema": large, "strict": False, "place": f"[{i}]", "inside": True} for i in range(120)
    }
    tools["small"] = {"schema": small, "strict": True, "place": "[120]", "inside": True}
    grammar = grammar_of("calls", {"tools": tools, "parallel": True})
    assert takes(grammar, '[{"name": "f1", "arguments": {"other": 1}}]')
    assert takes(grammar, '[{"name": "small", "arguments": {"a": 1}}]')
    assert not takes(grammar, '[{"name": "small", "arguments": {"a": "x"}}]')
    strict = {name: {**tool, "strict": True} for name, tool in tools.items()}
    with pytest.raises(InvalidGrammar, match="too large together"):
        grammar_of("calls", {"tools": strict, "parallel": True})
