"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}], and since v11 [TOOL_CALLS]f[ARGS]{...}, once a call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.gateway.tools.call import Call, CallReader, Taken, call_of, json_text, parsed
from services.gateway.tools.json_call import JsonCall

BEGIN = "[TOOL_CALLS]"
HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
NEITHER = re.compile(r"\s*[\w.-]+\s+[^\s\[{]|\s*[^\s\w.\[-]")
BETWEEN = re.compile(r"[\s,]*")


class Mistral(CallReader):
    begins = (BEGIN,)
    id_form = "{:.9}"  # its templates take no others
    parts = ("[CALL_ID]", "[ARGS]")

    def _open(self) -> None:
        super()._open()
        self._listed: list[Call] = []  # the complete ones of a list, up to `_at`
        self._at: int | None = None
        self._call = JsonCall()

    def _take(self, text: str) -> Taken | None:
        if head := HEAD.match(text, len(BEGIN)):
            end = self._brackets.end(text, head.end())
            return None if end is None else self._one(text, head, end)
        start = _list(text)
        if start is not None:
            end = self._brackets.end(text, start)
            return None if end is None else self._many(text, start, end)
        return Taken(len(text)) if NEITHER.match(text, len(BEGIN)) else None

    def _sketch(self, text: str) -> Sequence[Call]:
        if head := HEAD.match(text, len(BEGIN)):
            return [Call(head["name"], json_text(text[head.end() :]))]
        start = _list(text)
        return () if start is None else self._calls(text, start)

    def _one(self, text: str, head: re.Match[str], end: int) -> Taken:
        call = call_of({"name": head["name"], "arguments": parsed(text[head.end() : end])})
        return Taken(end, self._sketch(text[:end]) if call else ())

    def _many(self, text: str, start: int, end: int) -> Taken:
        found = parsed(text[start:end])
        are_calls = isinstance(found, list) and all(map(call_of, found))
        return Taken(end, self._calls(text[:end], start) if are_calls else ())

    def _calls(self, text: str, start: int) -> list[Call]:
        """Those of a list, the last one as far as it is there."""
        self._at = start + 1 if self._at is None else self._at
        while True:
            at = self._at = BETWEEN.match(text, self._at).end()  # type: ignore[union-attr]
            end = self._call.end(text, at) if text.startswith("{", at) else None
            if end is None:
                begun = self._call.begun(text, at)
                return [*self._listed, begun] if begun else self._listed
            call = self._call.made(text, at, end)
            if call is None:
                return self._listed
            self._listed, self._at, self._call = [*self._listed, call], end, JsonCall()


def _list(text: str) -> int | None:
    body = text[len(BEGIN) :].lstrip()
    return len(text) - len(body) if body.startswith("[") else None
