"""Bounds on how deep llguidance recurses into a grammar: by nesting, and by references that it follows.

llguidance recurses natively, without a bound. A binary search with a stack of 8 MiB (llguidance 1.x, chains of every
kind) found the shortest chains that crash it: 928 `$ref`s through `properties`, 1,040 through `anyOf`, 2,496 bare ones,
2,688 rules: at most 9 KiB of stack each. The helper has 16 MiB and workers 32 MiB for chains up to the bound here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from tandem.grammar.errors import InvalidGrammar

MAX_NESTING = 64
MAX_DEPTH = 1000

_SILENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*')
_NAME = re.compile(r"[A-Za-z_]\w*")
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)[^:\n|]*:", re.MULTILINE)


def check_schema(schema: Any, place: str = "") -> None:
    """Checks that a schema is not too deep. Raises InvalidGrammar."""
    if max((depth for _, depth in _walked(schema)), default=0) > MAX_NESTING:
        raise InvalidGrammar(f"must not be nested deeper than {MAX_NESTING}", place)
    refers = {id(part): target for part, _ in _walked(schema) if (target := target_of(schema, part)) is not None}
    seen: set[int] = set()
    waiting = [(schema, 1)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidGrammar(f"must not be deeper than {MAX_DEPTH}, references followed", place)
        waiting += [(inner, depth + 1) for inner in _inside(part)]
        if (target := refers.get(id(part))) is not None and id(target) not in seen:
            seen.add(id(target))
            waiting.append((target, depth + 1))


def check_lark(grammar: str) -> None:
    """Checks that a Lark grammar is not too deep. Raises InvalidGrammar."""
    for text in _larks(grammar):
        for schema in _schemas(text):
            check_schema(schema)
        rules = _rules(text)
        seen: set[str] = set()
        waiting = [(name, 1) for name in ("start",)]
        while waiting:
            name, depth = waiting.pop()
            if depth > MAX_DEPTH:
                raise InvalidGrammar(f"rules must not refer to each other more than {MAX_DEPTH} deep")
            if name not in seen:
                seen.add(name)
                waiting += [(other, depth + 1) for other in rules.get(name, ())]


def _walked(schema: Any) -> Iterator[tuple[Any, int]]:
    waiting = [(schema, 1)]
    while waiting:
        part, depth = waiting.pop()
        yield part, depth
        waiting += [(inner, depth + 1) for inner in _inside(part)]


def _inside(part: Any) -> list[Any]:
    inside = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    return [inner for inner in inside if isinstance(inner, Mapping | list)]


def target_of(schema: Any, part: Any) -> Any:
    """Returns the part of a schema to which `part` refers; None without a reference within the schema, or a broken
    one.
    """
    said = part.get("$ref") if isinstance(part, Mapping) else None
    if not isinstance(said, str) or not said.startswith("#"):
        return None
    for key in unquote(said[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(key)
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema


def _larks(grammar: str) -> list[str]:
    if not grammar.startswith("{"):
        return [grammar]
    return [one["lark_grammar"] for one in json.loads(grammar)["grammars"] if "lark_grammar" in one]


def _schemas(text: str) -> Iterator[Any]:
    """Yields the JSON schemas within a Lark grammar."""
    reader = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", text):
        try:
            yield reader.raw_decode(text, found.end())[0]
        except (ValueError, RecursionError):
            raise InvalidGrammar("%json must be followed by a JSON schema") from None


def _rules(text: str) -> dict[str, list[str]]:
    """Returns the names in each rule's body; if in doubt, too many."""
    said = _SILENT.sub(" ", text)
    begins = [(found[1], found.end(), found.start()) for found in _RULE.finditer(said)]
    ends = [start for _, _, start in begins[1:]] + [len(said)]
    rules: dict[str, list[str]] = {}
    for (name, begin, _), end in zip(begins, ends, strict=True):
        rules.setdefault(name, []).extend(_NAME.findall(said, begin, end))
    return rules
