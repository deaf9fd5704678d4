"""Qwen3-Coder, Qwen3.5 and later: parameters as tags, their values as they are.

    <tool_call>
    <function=f>
    <parameter=a>
    text of any kind, tags within a line too
    </parameter>
    </function>
    </tool_call>

A tag counts where it can: a value ends at the </parameter> that another tag follows, or at a tag on a line of its own
where </parameter> was forgotten. What a value means, the tool's schema says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from services.gateway.tools.call import Call, CallReader, Taken, parsed, to_json

BEGIN, FUNCTION, END = "<tool_call>", "<function=", "</function>"
NAME = re.compile(r"<function=([^>\n]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
VALUE_END = re.compile(
    r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"
    r"|\n(?=<parameter=[^>\n]+>)"
    r"|\n(?=</function>\s*(?:</tool_call>|$))"
)
SPACE = re.compile(r"\s*")
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


class Qwen3Coder(CallReader):
    begins = (BEGIN, FUNCTION)
    closers = ("</tool_call>",)
    ends_thinking = (BEGIN,)

    def _take(self, text: str) -> Taken | None:
        start = len(BEGIN) if text.startswith(BEGIN) else 0
        start += len(text[start:]) - len(text[start:].lstrip())
        body = text[start:]
        if not body.startswith(FUNCTION):
            return None if FUNCTION.startswith(body) else Taken(start)
        if END not in text:
            return None
        return self._function(text, start)

    def _function(self, text: str, start: int) -> Taken | None:
        head = NAME.match(text, start)
        if head is None:
            return Taken(start + len(FUNCTION))
        name = head[1].strip()
        given, at = {}, head.end()
        while found := PARAMETER.match(text, at):
            end = VALUE_END.search(text, max(found.end() - 1, found.start()))
            if end is None:
                return None
            given[found[1].strip()] = text[found.end() : max(end.start(), found.end())]
            at = SPACE.match(text, end.end()).end()  # type: ignore[union-attr]
        if not text.startswith(END, at):
            return None if _may_go_on(text[at:]) else Taken(at)
        types = self._schemas.get(name, {}).get("properties", {})
        arguments = {key: typed(value, types.get(key, {})) for key, value in given.items()}
        return Taken(at + len(END), [Call(name, to_json(arguments))])


def _may_go_on(rest: str) -> bool:
    return any(tag.startswith(rest) or rest.startswith(tag) for tag in ("<parameter=", END))


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that a text stands for, of a type that the schema allows; the text itself where none fits."""
    allowed = allowed_types(schema)
    if allowed == {"string"}:
        return text
    for read in (parsed, _literal):
        value = read(text.strip())
        if value is None and text.strip() not in ("null", "None"):
            continue
        if not allowed or any(_fits(value, kind) for kind in allowed):
            return value
    return text


def allowed_types(schema: Any) -> set[str]:
    """Empty where the schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key) or ():
            found |= allowed_types(part)
    if not found and "enum" in schema:
        found = {kind for kind in TYPES for value in schema["enum"] if _fits(value, kind)}
    return found


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(kind, ()))


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
        to_json({"": value})
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return value
