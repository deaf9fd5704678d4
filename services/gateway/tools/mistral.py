"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}], and since v11 [TOOL_CALLS]f[ARGS]{...}, once a call."""

from __future__ import annotations

import re

from services.gateway.tools.call import Call, CompleteCall, Schemas, begun, json_text
from services.gateway.tools.json_call import JsonCalls

BEGIN = "[TOOL_CALLS]"
S = r"\s{0,64}"  # so much white space, and no more: it is looked at again with each piece of text
HEAD = re.compile(
    rf"\[TOOL_CALLS\]{S}(?P<name>[\w.-]{{1,256}}){S}(?:\[CALL_ID\]\w+{S})?(?:\[ARGS\])?{S}(?=\{{{S}[\"}}])"
)
# What comes before an object of a list; and all that may yet become that, or a head.
ENTRY = re.compile(rf"(?:\[TOOL_CALLS\]{S}\[|,){S}(?=\{{)")
MAY_BE_ENTRY = re.compile(rf"(?:\[TOOL_CALLS\]{S}\[?|,){S}")
MAY_BE_HEAD = re.compile(
    rf"\[TOOL_CALLS\]{S}[\w.-]{{0,256}}{S}"
    rf"(?:{begun('[CALL_ID]')}|\[CALL_ID\]\w*{S}(?:{begun('[ARGS]')})?|{begun('[ARGS]')})?"
    rf"{S}(?:(?<!CALL_ID\])\{{{S})?"
)


class Mistral(JsonCalls):
    begins = (BEGIN,)
    id_form = "{:.9}"  # its templates take no others
    parts = ("[CALL_ID]", "[ARGS]")

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._listed = False  # behind a call of a list

    def _object(self, text: str) -> int | None:
        entry = ENTRY.match(text)
        return entry.end() if entry else None

    def _take(self, text: str) -> CompleteCall | None:
        if head := HEAD.match(text):
            end = self._brackets.end(text, head.end())
            return None if end is None else CompleteCall(end, self._sketch(text[:end]))
        if ENTRY.match(text):
            taken = super()._take(text)
            self._listed = bool(taken and taken.calls)
            return taken
        return None if _may_become_one(text) else self._no_call(text)

    def _sketch(self, text: str) -> list[Call]:
        if head := HEAD.match(text):
            return [Call(head["name"], json_text(text[head.end() :]))]
        return list(super()._sketch(text))

    def _marked(self, text: str) -> bool:
        return super()._marked(text) or text.startswith(",")

    def _close(self) -> bool:
        """Behind a call of a list: its end, or the next one."""
        if not self._listed:
            return super()._close()
        rest = self._held.lstrip()
        if not rest:
            return False
        self._listed = self._closing = False
        if rest.startswith("]"):
            self._held = rest[1:]
        elif MAY_BE_ENTRY.match(rest):
            self._held = rest
            self._open()
        return True


def _may_become_one(text: str) -> bool:
    return bool(MAY_BE_ENTRY.fullmatch(text) or MAY_BE_HEAD.fullmatch(text))
