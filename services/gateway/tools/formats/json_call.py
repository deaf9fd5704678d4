"""Calls that are JSON objects: {"name": "f", "arguments" or "parameters": {...}}."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence

from services.gateway.tools.brackets import Brackets
from services.gateway.tools.call import Call, CallReader, CompleteCall, call_of, json_text, may_be_json, parsed

# The beginning of an object that may be a call.
OPENING = re.compile(r'\{\s*(?:"|$)')
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])', re.DOTALL
)
# Attempts to parse an incomplete body, each of which reads all of it.
MOST_LOOKS = 8


class JsonCall:
    """One call while it is written, at a fixed place of a growing text."""

    def __init__(self) -> None:
        self._whole, self._arguments = Brackets('"'), Brackets('"')
        self._head: re.Match[str] | None = None
        self._end: int | None = None  # end of the arguments

    def end(self, text: str, start: int) -> int | None:
        """Returns the end of the object at `start`; None while incomplete."""
        return self._whole.end(text, start)

    def begun(self, text: str, start: int) -> Call | None:
        """Returns the call with its arguments so far; None while its name is unknown."""
        head = self._head = self._head or HEAD.match(text, start)
        name = parsed(head[1]) if head else None
        if head is None or not isinstance(name, str):
            return None
        if self._end is None:
            self._end = self._arguments.end(text, head.end())
        return Call(name, json_text(text[head.end() : self._end]))

    def made(self, text: str, start: int, end: int) -> Call | None:
        """Returns the call in text[start:end]; None if it is none and has not begun."""
        return self.begun(text[:end], start) or call_of(parsed(text[start:end]))

    def ended_by(self, text: str, start: int, nothing_follows: bool) -> int | None:
        """Returns the end of the arguments of a call whose closing bracket is missing."""
        if self.begun(text, start) is None or self._end is None:
            return None
        rest = text[self._end :].lstrip()
        return self._end if (rest and rest[0] not in ",}") or (nothing_follows and not rest) else None

    def may_follow(self, text: str, start: int) -> bool:
        """True while the text could become a call."""
        return self.begun(text, start) is not None or may_be_json(text[start:])


class JsonCalls(CallReader):
    """Reads bodies of one call each."""

    def _open(self) -> None:
        super()._open()
        self._call = JsonCall()
        self._looked, self._num_looks = 0, 0

    @abstractmethod
    def _object(self, text: str) -> int | None:
        """Returns the position of the object in a body; None before it."""

    def _offered(self, text: str, name: str) -> bool:
        """True if a body may call this tool."""
        return True

    def _take(self, text: str) -> CompleteCall | None:
        start = self._object(text)
        if start is None:
            return None
        if not OPENING.match(text, start):
            return self._no_call(text)
        end = self._call.ended_by(text, start, self._ended and not self._cut)
        end = self._call.end(text, start) if end is None else end
        if end is None:
            return self._no_call(text) if self._may_be_cut(text) and not self._call.may_follow(text, start) else None
        call = self._call.made(text, start, end)
        if call and self._offered(text, call.name):
            return CompleteCall(end, [call])
        return self._no_call(text) if parsed(text[start:end]) is None else CompleteCall(end)

    def _may_be_cut(self, text: str) -> bool:
        """True at the answer's end, and after a mark, which may also be inside a string."""
        marks = [mark for mark in (*self.begins, *self.closers) if len(mark) > 1]
        if self._ended or not marks or self._num_looks == MOST_LOOKS:
            return self._ended
        looked = self._looked or len(marks[0])
        ends = [at + len(mark) for mark in marks if (at := text.find(mark, looked)) >= 0]
        self._looked = min(ends, default=max(looked, len(text) - max(map(len, marks)) + 1))
        self._num_looks += bool(ends)
        return bool(ends)

    def _no_call(self, text: str) -> CompleteCall:
        """Returns a body that is text up to the mark, right after which a call may begin."""
        return CompleteCall(max([1, *(len(begin) for begin in self.begins if text.startswith(begin))]))

    def _sketch(self, text: str) -> Sequence[Call]:
        start = self._object(text)
        call = None if start is None else self._call.begun(text, start)
        return [call] if call and self._offered(text, call.name) else ()
