"""Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

from __future__ import annotations

from services.gateway.tools.formats.json_call import JsonCalls

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(JsonCalls):
    begins = (BEGIN,)
    closers = (END,)
    strict_tag = (BEGIN + '\n{{"name": {name}, "arguments": ', "}\n" + END)

    def _object(self, text: str) -> int | None:
        body = text[len(BEGIN) :].lstrip()
        return len(text) - len(body) if body else None
