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
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.tools.call import Call, CallReader, CompleteCall, Schemas, begun, parsed, to_json

BEGIN, FUNCTION, END = "<tool_call>", "<function=", "</function>"
NAME = re.compile(r"<function=(?=[^>\n]{1,256}>)[^\S\n]*([^\s>][^>\n]*)>\s*")
MAY_BE_NAME = re.compile(r"<function=[^>\n]{0,256}")
MAY_BE_PARAMETER = re.compile(rf"{begun('<parameter=')}|<parameter=[^>\n]*|{begun('</function>')}")
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
VALUE_END = re.compile(
    r"\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>))"
    r"|\n(?=<parameter=[^>\n]+>)"
    r"|\n(?=</function>\s*</tool_call>)"
)
LAST_VALUE_END = re.compile(rf"{VALUE_END.pattern}|\n(?=</function>\s*$)")  # at the answer's end
# May become the end of a value.
MAY_END = re.compile(r"\n?(?:</parameter>\s*|</function>\s*)?(?:<[^>\n]*)?$")
SPACE = re.compile(r"\s*")
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


class Qwen3Coder(CallReader):
    begins = (BEGIN, FUNCTION)
    closers = ("</tool_call>",)
    ends_thinking = (BEGIN,)

    def _open(self) -> None:
        super()._open()
        self._written = _PartialCall(self._schemas)

    def _sketch(self, text: str) -> Sequence[Call]:
        return self._written.read(text, _start(text))

    def _take(self, text: str) -> CompleteCall | None:
        start = _start(text)
        body = text[start:]
        if not body.startswith(FUNCTION):
            return None if FUNCTION.startswith(body) else CompleteCall(start)
        head = NAME.match(text, start)
        if head is None:
            return None if MAY_BE_NAME.fullmatch(text, start) else CompleteCall(start + len(FUNCTION))
        if END not in text:
            return None if _may_go_on(text, head.end()) else CompleteCall(head.end())
        return self._function(text, head)

    def _function(self, text: str, head: re.Match[str]) -> CompleteCall | None:
        name, value_end = head[1].strip(), LAST_VALUE_END if self._ended else VALUE_END
        given: dict[str, str] = {}
        at = head.end()
        while found := PARAMETER.match(text, at):
            end = value_end.search(text, max(found.end() - 1, found.start()))
            if end is None:
                return None
            given.setdefault(found[1].strip(), text[found.end() : max(end.start(), found.end())])
            at = SPACE.match(text, end.end()).end()  # type: ignore[union-attr]
        if not text.startswith(END, at):
            return None if _may_go_on(text, at) else CompleteCall(at)
        types = _types(self._schemas, name)
        arguments = {key: typed(value, types.get(key, {})) for key, value in given.items()}
        return CompleteCall(at + len(END), [Call(name, to_json(arguments))])


class _PartialCall:
    """A call while it is written: values once complete, strings as far as they certainly continue."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._name = ""
        self._at = self._value = self._read = 0  # end of complete values; begin of the present one; read up to here
        self._given: dict[str, Any] = {}
        self._key: str | None = None
        self._open = ""  # an incomplete value's text as JSON

    def read(self, text: str, start: int) -> Sequence[Call]:
        if not self._name:
            head = NAME.match(text, start)
            if head is None:
                return ()
            if not text.startswith(END, head.end()) and not PARAMETER.match(text, head.end()):
                return ()  # it may still be text
            self._name, self._at = head[1].strip(), head.end()
        while self._value_read(text):
            pass
        complete = to_json(self._given).removesuffix("}") if self._given else "{"
        return [Call(self._name, complete + self._open if self._given or self._open else "")]

    def _value_read(self, text: str) -> bool:
        """Read on in the present value. Returns True if it is complete and another may follow."""
        if self._key is None and not self._found(text):
            return False
        assert self._key is not None
        types = _types(self._schemas, self._name).get(self._key, {})
        end = VALUE_END.search(text, self._read)
        if end is None:
            self._read = MAY_END.search(text, self._read).start()  # type: ignore[union-attr]
            if allowed_types(types) == {"string"} and self._key not in self._given:
                value = json.dumps(text[self._value : max(self._read, self._value)], ensure_ascii=False).removesuffix(
                    '"'
                )
                self._open = f"{', ' if self._given else ''}{json.dumps(self._key, ensure_ascii=False)}: {value}"
            return False
        self._given.setdefault(self._key, typed(text[self._value : max(end.start(), self._value)], types))
        self._at, self._key, self._open = end.end(), None, ""
        return True

    def _found(self, text: str) -> bool:
        found = PARAMETER.match(text, SPACE.match(text, self._at).end())  # type: ignore[union-attr]
        if found is None or (found.end() == len(text) and not found[0].endswith("\n")):  # its newline may still come
            return False
        self._key, self._value, self._read = found[1].strip(), found.end(), found.end() - 1
        return True


def _start(text: str) -> int:
    start = len(BEGIN) if text.startswith(BEGIN) else 0
    return SPACE.match(text, start).end()  # type: ignore[union-attr]


def _types(schemas: Schemas, name: str) -> Mapping[str, Any]:
    types = schemas.get(name, {}).get("properties")
    return types if isinstance(types, Mapping) else {}


def _may_go_on(text: str, at: int) -> bool:
    return bool(PARAMETER.match(text, at) or MAY_BE_PARAMETER.fullmatch(text, at) or at == len(text))


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Returns the value of a text, of a type that the schema allows; the text itself if none fits."""
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
    """Returns the types that a schema allows; empty if it does not name any."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else {kind for kind in _list(kinds) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        for part in _list(schema.get(key)):
            found |= allowed_types(part)
    if not found:
        found = {kind for kind in TYPES for value in _list(schema.get("enum")) if _fits(value, kind)}
    return found


def _list(said: Any) -> list[Any]:
    """Returns a list in a schema; [] for other values, as unenforced schemas are not checked."""
    return said if isinstance(said, list) else []


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
