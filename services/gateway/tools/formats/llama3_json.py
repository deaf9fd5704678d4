"""Llama 3.1 and later: {"name": "f", "parameters": {...}}, with <|python_tag|> before it or not.

Without the tag only the beginning of an answer is a call, and only of an offered tool.
"""

from __future__ import annotations

from services.gateway.tools.formats.json_call import JsonCalls

TAG = "<|python_tag|>"


class Llama3Json(JsonCalls):
    begins = (TAG,)
    opens = ("{",)
    closers = (";",)

    def _object(self, text: str) -> int | None:
        body = text.removeprefix(TAG).lstrip()
        return len(text) - len(body) if body else None

    def _offered(self, text: str, name: str) -> bool:
        return text.startswith(TAG) or name in self._schemas
