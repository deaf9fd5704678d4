"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}], and since v11 [TOOL_CALLS]f[ARGS]{...}, once a call."""

from __future__ import annotations

import re

from services.gateway.tools.call import Call, CompleteCall, begun, json_text
from services.gateway.tools.formats.listed import ListedCalls, S

HEAD = re.compile(
    rf"\[TOOL_CALLS\]{S}(?P<name>[\w.-]{{1,256}}){S}(?:\[CALL_ID\]\w+{S})?(?:\[ARGS\])?{S}(?=\{{{S}[\"}}])"
)
MAY_BE_HEAD = re.compile(
    rf"\[TOOL_CALLS\]{S}[\w.-]{{0,256}}{S}"
    rf"(?:{begun('[CALL_ID]')}|\[CALL_ID\]\w*{S}(?:{begun('[ARGS]')})?|{begun('[ARGS]')})?"
    rf"{S}(?:(?<!CALL_ID\])\{{{S})?"
)


class Mistral(ListedCalls):
    begins = ("[TOOL_CALLS]",)
    id_form = "{:.9}"  # the only form that its templates accept
    parts = ("[CALL_ID]", "[ARGS]")

    def _take(self, text: str) -> CompleteCall | None:
        if head := HEAD.match(text):
            end = self._brackets.end(text, head.end())
            return None if end is None else CompleteCall(end, self._sketch(text[:end]))
        return None if MAY_BE_HEAD.fullmatch(text) else super()._take(text)

    def _sketch(self, text: str) -> list[Call]:
        if head := HEAD.match(text):
            return [Call(head["name"], json_text(text[head.end() :]))]
        return list(super()._sketch(text))
