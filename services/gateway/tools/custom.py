"""Custom tools: functions of one text, `input`, optionally constrained by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.tools.call import begun

KEY = '"input"'


def text_function(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the description, parameters and `strict` of a custom tool's function. Raises InvalidRequest."""
    text: dict[str, Any] = {"type": "string"}
    strict = None
    description = said.get("description") or ""
    match said.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(definition)} | {
            "type": "grammar",
            "grammar": {"syntax": "lark" | "regex" as syntax, "definition": str(definition)},
        }:
            description = f"{description}\nThe input follows its {syntax} grammar.".lstrip()
            text |= {"x-lark": definition} if syntax == "lark" else {"pattern": f"^(?:{definition})$"}
            strict = True
        case _:
            what = "of type text, or of type grammar with a definition and a syntax, lark or regex"
            raise InvalidRequest(f"{where}.format must be {what}", f"{where}.format")
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"description": description, "parameters": parameters, "strict": strict}


class OnlyString:
    """Reads the value in {"input": "value"} while its JSON is written. A text of another form is the value itself."""

    HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    MAY_BE_HEAD = re.compile(rf"\s*(?:\{{\s*(?:{KEY}\s*(?::\s*)?|{begun(KEY)})?)?")
    # Text up to the string's end, or up to an incomplete escape; surrogate pairs stay in one piece.
    WHOLE = re.compile(
        r'(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
    )

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def feed(self, text: str) -> str:
        """Returns the new part of the value that is certain."""
        self._held += text
        if self._state == "before" and (head := self.HEAD.match(self._held)):
            self._held, self._state = self._held[head.end() :], "within"
        elif self._state == "before" and not self.MAY_BE_HEAD.fullmatch(self._held):
            self._state = "other"
        if self._state == "other":
            text, self._held = self._held, ""
            return text
        if self._state != "within":
            return ""
        whole = self.WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        if self._held.startswith('"'):
            self._state = "after"
        return _unescaped(whole[0])

    def rest(self) -> str:
        """Returns the whole text at its end, if no value has begun."""
        return self._held if self._state == "before" else ""


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False)) if "\\" in text else text
    except ValueError:
        return text
