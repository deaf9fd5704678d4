"""Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

from __future__ import annotations

from services.gateway.tools.call import CallReader, Taken, call_of, parsed

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(CallReader):
    begins = (BEGIN,)
    closers = (END,)
    strict_tag = (BEGIN + '\n{{"name": {name}, "arguments": ', "}\n" + END)

    def _take(self, text: str) -> Taken | None:
        body = text[len(BEGIN) :].lstrip()
        start = len(text) - len(body)
        if body and body[0] != "{":
            closed = text.find(END)
            return None if closed < 0 else Taken(closed + len(END))
        end = self._brackets.end(text, start) if body else None
        if end is None:
            return None
        call = call_of(parsed(text[start:end]))
        return Taken(end, [call] if call else ())
