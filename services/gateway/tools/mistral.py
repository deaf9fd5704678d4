"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}], and since v11 [TOOL_CALLS]f[ARGS]{...}, once a call."""

from __future__ import annotations

import re

from services.gateway.tools.call import Call, CallReader, Taken, call_of, parsed

BEGIN = "[TOOL_CALLS]"
HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
NEITHER = re.compile(r"\s*[\w.-]+\s+[^\s\[{]|\s*[^\s\w.\[-]")


class Mistral(CallReader):
    begins = (BEGIN,)
    id_form = "{:.9}"  # its templates take no others
    parts = ("[CALL_ID]", "[ARGS]")

    def _take(self, text: str) -> Taken | None:
        if head := HEAD.match(text, len(BEGIN)):
            end = self._brackets.end(text, head.end())
            return None if end is None else self._one(text, head, end)
        body = text[len(BEGIN) :].lstrip()
        if body.startswith("["):
            start = len(text) - len(body)
            end = self._brackets.end(text, start)
            return None if end is None else self._many(text, start, end)
        return Taken(len(text)) if NEITHER.match(text, len(BEGIN)) else None

    def _one(self, text: str, head: re.Match[str], end: int) -> Taken:
        call = call_of({"name": head["name"], "arguments": parsed(text[head.end() : end])})
        return Taken(end, [call] if call else ())

    def _many(self, text: str, start: int, end: int) -> Taken:
        found = parsed(text[start:end])
        calls = [call_of(one) for one in found] if isinstance(found, list) else []
        whole: list[Call] = [call for call in calls if call]
        return Taken(end, whole if len(whole) == len(calls) else ())
