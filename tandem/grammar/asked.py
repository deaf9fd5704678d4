"""Makes checked grammars of the formats that clients ask for. Runs in the gateway's helper process.

Any fault in a format becomes an InvalidGrammar that names the place; the helper guards against crashes and resource
use.

A tool call follows the tool's schema as far as a grammar can express it: keywords that no grammar can express
(`propertyNames`, `uniqueItems`, some formats) are ignored, and a schema that still fails allows any object. A `strict`
tool's schema is enforced completely, or the tool is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tandem.grammar import build
from tandem.grammar.depth import check_schema
from tandem.grammar.errors import InvalidGrammar

MAX_LENGTH = 256 * 1024  # characters of a schema or grammar
MAX_CHOICES = 1024
MAX_PLACES = 64  # most places that are searched for a schema's fault
# The stack of the compiling thread. Chains as long as MAX_DEPTH need a quarter of it.
STACK_BYTES = 16 * 2**20
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
NESTED = ("properties", "patternProperties", "$defs", "definitions")
# Each of a value's `tools` has a `schema`, `strict`, and the `place` of the schema in the body. `inside`: the client
# wrote the schema itself, so that errors name the faulty place within the schema, too.
OF_CALLS = ("call", "calls", "channel_call", "tagged_calls")
Tools = Mapping[str, Mapping[str, Any]]
ANY_OBJECT = {"type": "object"}
INSIDE = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems")


Behind = str | int | Mapping[str, str | int] | None


def grammar_of(kind: str, value: Any, behind: Behind = None) -> str:
    """Returns the grammar of a format, checked.

    Args:
        kind: one of KINDS or OF_CALLS.
        behind: the text or special token that ends the thoughts before the answer, or gpt-oss' message marks.

    Raises:
        InvalidGrammar
    """
    try:
        return _grammar_of(kind, value, behind)
    except (RecursionError, ValueError) as error:
        if kind in OF_CALLS:
            return _held_in_part(kind, value, behind)
        raise _named(error, kind, value) from None


def _named(error: RecursionError | ValueError, kind: str, value: Any) -> InvalidGrammar:
    """Returns the error with the place of what is wrong."""
    if isinstance(error, RecursionError):
        return InvalidGrammar("must not be nested so deeply")
    if not isinstance(error, InvalidGrammar):  # raised by llguidance, or for a text that is no valid Unicode
        return InvalidGrammar(str(error))
    of_all = kind != "json" or error.problem.startswith("must ")
    return InvalidGrammar(error.problem, error.place or ("" if of_all else _place(value, error.problem)))


def _held_in_part(kind: str, value: Mapping[str, Any], behind: Behind) -> str:
    """Returns a grammar of calls, some of whose schemas no grammar can express completely.

    Raises:
        InvalidGrammar: such a schema is a strict tool's, or the schemas are too large together.
    """
    tools = {name: _holdable(name, tool) for name, tool in value["tools"].items()}
    if tools == value["tools"]:  # each schema can be expressed, but not all together
        tools = {name: tool if tool["strict"] else {**tool, "schema": ANY_OBJECT} for name, tool in tools.items()}
    try:
        return _grammar_of(kind, {**value, "tools": tools}, behind)
    except (RecursionError, ValueError):
        raise InvalidGrammar("their schemas are too large together for an answer to be held to them") from None


def _holdable(name: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tool with the part of its schema that a grammar can express."""
    if tool["strict"]:
        try:
            grammar_of("json", tool["schema"])
        except InvalidGrammar as error:
            place = tool["place"] + (error.place if tool["inside"] else "")
            raise InvalidGrammar(f"tool {name!r}: {error.problem}", place) from None
        return tool
    for schema in (tool["schema"], {**tool["schema"], "x-guidance": build.LENIENT}):
        try:
            _grammar_of("json", schema, None)
            return {**tool, "schema": schema}
        except (RecursionError, ValueError):
            continue
    return {**tool, "schema": ANY_OBJECT}


def _grammar_of(kind: str, value: Any, behind: Behind) -> str:
    if len(value if isinstance(value, str) else json.dumps(value)) > MAX_LENGTH:
        raise InvalidGrammar(f"must have at most {MAX_LENGTH} characters")
    made = begin = _made(kind, value, behind)
    build.check(made)
    if kind == "channel_call":  # `check_begin` has no special tokens: marks are spelled as text
        begin = _made(kind, {**value, "marks": _spelled(value["marks"])}, behind)
    elif isinstance(behind, Mapping):
        begin = _made(kind, value, _spelled(behind))
    build.check_begin(begin)
    return made


def _made(kind: str, value: Any, behind: Behind) -> str:
    made = BUILDERS[kind](value)
    if isinstance(behind, Mapping):
        return build.behind_channels(made, behind)
    return made if behind is None else build.behind_thoughts(made, behind)


def _spelled(marks: Mapping[str, str | int]) -> dict[str, str | int]:
    return {name: f"<|{name}|>" for name in marks}


def _json(value: Any) -> str:
    schema = _parsed(value)
    if not isinstance(schema, Mapping):
        raise InvalidGrammar("must be a JSON schema, an object")
    check_schema(schema)
    for place, part in _parts_within(schema):
        if isinstance(part.get("$ref"), str) and isinstance(part.get("$id"), str):
            # Drafts up to 7 ignore such an $id, but llguidance would follow it.
            raise InvalidGrammar("$id beside $ref is not supported", place)
    return build.of_json_schema(schema)


def _regex(value: Any) -> str:
    return build.of_regex(_text(value))


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise InvalidGrammar("must be a list of strings that are not empty")
    if len(value) > MAX_CHOICES:
        raise InvalidGrammar(f"must have at most {MAX_CHOICES} strings, got {len(value)}")
    return build.of_choice(value)


def _own(value: Any) -> str:
    return build.of_grammar(_text(value))


def _json_object(value: Any) -> str:
    if value is not True:
        raise InvalidGrammar("must be true")
    return build.of_json_schema({"type": "object"})


def _structural_tag(value: Any) -> str:
    said = _parsed(value)
    structures = said.get("structures") if isinstance(said, Mapping) else None
    triggers = said.get("triggers") if isinstance(said, Mapping) else None
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidGrammar("must have structures and triggers, two lists")
    for i, tag in enumerate(structures):
        if not isinstance(tag, Mapping) or not all(isinstance(tag.get(key), str) for key in ("begin", "end")):
            raise InvalidGrammar("must have begin, schema and end", f".structures[{i}]")
        if not isinstance(tag.get("schema"), Mapping):
            raise InvalidGrammar("must be an object", f".structures[{i}].schema")
    if not all(isinstance(one, str) and one for one in triggers):
        raise InvalidGrammar("must be strings that are not empty", ".triggers")
    return build.of_tags(structures, triggers)


def _call(value: Any) -> str:
    (schema,) = _schemas(value["tools"]).values()
    return _json(schema)


def _calls(value: Any) -> str:
    return build.of_calls(_schemas(value["tools"]), None if value["parallel"] else 1)


def _channel_call(value: Any) -> str:
    return build.of_channel_call(_schemas(value["tools"]), value["marks"])


def _tagged_calls(value: Any) -> str:
    begin, end = value["tag"]
    schemas = _schemas(value["tools"]).items()
    tags = [{"begin": begin.format(name=json.dumps(name)), "schema": schema, "end": end} for name, schema in schemas]
    return build.of_tags(tags, [value["trigger"]])


def _schemas(tools: Tools) -> dict[str, Any]:
    return {name: tool["schema"] for name, tool in tools.items()}


BUILDERS: Mapping[str, Callable[[Any], str]] = {
    **dict(zip(KINDS, (_json, _regex, _choice, _own, _json_object, _structural_tag), strict=True)),
    **dict(zip(OF_CALLS, (_call, _calls, _channel_call, _tagged_calls), strict=True)),
}


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InvalidGrammar(f"is not valid JSON: {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidGrammar("must be a string that is not empty")
    return value


def _parts_within(value: Any, place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields all objects in a value that is not nested deeply, with their places."""
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        yield place, value
        inside = [(f"{place}.{key}", part) for key, part in value.items()]
    elif isinstance(value, list):
        inside = [(f"{place}[{i}]", part) for i, part in enumerate(value)]
    for at, part in inside:
        if isinstance(part, Mapping | list):
            yield from _parts_within(part, at)


def _place(value: Any, problem: str) -> str:
    """Returns the path to the part of a schema that is refused for this reason."""
    found, looked_at = "", 0
    parts = _parts(_parsed_or_none(value))
    while parts and looked_at < MAX_PLACES:
        place, part = parts.pop()
        looked_at += 1
        if _problem(part) == problem:
            found, parts = found + place, _parts(part)
    return found


def _parsed_or_none(value: Any) -> Any:
    try:
        return _parsed(value)
    except (InvalidGrammar, RecursionError):
        return None


def _problem(schema: Any) -> str:
    try:
        build.check(build.of_json_schema(schema))
    except InvalidGrammar as error:
        return error.problem
    return ""


def _parts(schema: Any) -> list[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return []
    parts: list[tuple[str, Any]] = []
    for key in NESTED:
        named = schema.get(key)
        parts += [(f".{key}.{name}", part) for name, part in named.items()] if isinstance(named, Mapping) else []
    for key in INSIDE:
        inside = schema.get(key)
        many = enumerate(inside) if isinstance(inside, list) else ()
        parts += [(f".{key}[{i}]", part) for i, part in many] or [(f".{key}", inside)]
    return [(place, part) for place, part in parts if isinstance(part, Mapping)]
