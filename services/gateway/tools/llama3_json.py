"""Llama 3.1 and later: {"name": "f", "parameters": {...}}, with <|python_tag|> before it or not.

Without the tag it is a call only as the first that is said, and only of a tool that was offered.
"""

from __future__ import annotations

from services.gateway.tools.call import CallReader, Taken, call_of, parsed

TAG = "<|python_tag|>"


class Llama3Json(CallReader):
    begins = (TAG,)
    opens = ("{",)
    closers = (";",)

    def _take(self, text: str) -> Taken | None:
        tag = len(TAG) if text.startswith(TAG) else 0
        start = len(text) - len(text[tag:].lstrip())
        if start == len(text):
            return None
        if text[start] != "{":
            return Taken(start)
        end = self._brackets.end(text, start)
        if end is None:
            return None
        call = call_of(parsed(text[start:end]))
        if call is None or not (tag or call.name in self._schemas):
            return Taken(end)
        return Taken(end, [call])
