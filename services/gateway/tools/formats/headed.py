"""Calls whose name comes before their arguments, an object."""

from __future__ import annotations

import re
from typing import ClassVar

from services.gateway.tools.call import Call, CallReader, CompleteCall, begun, json_text

S = r"\s{0,64}"  # bounded, as it is matched again with each piece of text
Part = tuple[str, str]  # a pattern, and one that matches its beginnings
NAME: Part = (r"(?P<name>[\w.-]{1,256})", r"[\w.-]{0,256}")
SPACE: Part = (S, S)
OBJECT: Part = (rf"(?=\{{{S}[\"}}])", rf"(?:\{{{S})?")


def mark(text: str) -> Part:
    return re.escape(text), begun(text)


def whole(*parts: Part) -> re.Pattern[str]:
    return re.compile("".join(part for part, _ in parts))


def partly(*heads: tuple[Part, ...]) -> re.Pattern[str]:
    """Returns a pattern of everything that may become one of the heads."""
    found = ("".join(part for part, _ in parts[:i]) + part for parts in heads for i, (_, part) in enumerate(parts))
    return re.compile(re.sub(r"\?P<\w+>", "?:", "|".join(found)))


class HeadedCalls(CallReader):
    heads: ClassVar[tuple[re.Pattern[str], ...]]
    may_be_head: ClassVar[re.Pattern[str]]

    def _open(self) -> None:
        super()._open()
        self._head: re.Match[str] | None = None
        self._end: int | None = None  # end of the arguments

    def _take(self, text: str) -> CompleteCall | None:
        self._head = self._head or next((found for head in self.heads if (found := head.match(text))), None)
        if self._head is None:
            return None if self.may_be_head.fullmatch(text) else CompleteCall(self._mark_length(text))
        if self._end is None:
            self._end = self._brackets.end(text, self._head.end())
        behind = None if self._end is None else self._behind(text, self._end)
        return None if behind is None else CompleteCall(behind, self._sketch(text))

    def _behind(self, text: str, end: int) -> int | None:
        """Returns the end of a call whose arguments end at `end`; None while uncertain."""
        return end

    def _sketch(self, text: str) -> list[Call]:
        head = self._head
        return [Call(head["name"], json_text(text[head.end() : self._end]))] if head else []

    def _mark_length(self, text: str) -> int:
        """Returns the length to pass as text: another call may begin right after the mark."""
        return max([1, *(len(begin) for begin in self.begins if text.startswith(begin))])
