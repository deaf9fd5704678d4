"""Reads one answer's text for thoughts, content and calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.gateway.tools.call import Call, CallFormat, CallPart, Piece, Thought
from services.gateway.tools.thinking import Thinking


@dataclass(slots=True)
class Reading:
    """New parts of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = field(default_factory=list)
    parts: Sequence[CallPart] = field(default_factory=list)

    def __add__(self, more: Reading) -> Reading:
        calls, parts = [*self.calls, *more.calls], [*self.parts, *more.parts]
        return Reading(self.text + more.text, self.reasoning + more.reasoning, calls, parts)


class AnswerReader:
    def __init__(self, thinking: Thinking | None, calls: CallFormat | None, most_calls: int | None = None) -> None:
        """Calls beyond `most_calls` are dropped."""
        self._thinking = thinking
        self._calls = calls
        self._most = self._left = most_calls
        self._called = False
        self._said = False
        self._reasoned = False
        self._space: list[str] = []  # white space, part of the answer only if text follows

    @property
    def within_thoughts(self) -> bool:
        within = self._thinking is not None and self._thinking.within
        return within or (self._calls is not None and self._calls.within_thoughts)

    def feed(self, text: str) -> Reading:
        thoughts, rest = self._thinking.feed(text) if self._thinking else ("", text)
        return self._reading(thoughts, self._calls.feed(rest) if self._calls else [rest])

    def finish(self, cut: bool = False) -> Reading:
        """Returns the rest after the answer's end. `cut`: the answer was cut off."""
        thoughts, rest = self._thinking.finish() if self._thinking else ("", "")
        pieces: list[Piece] = [rest]
        if self._calls:
            pieces = [*self._calls.feed(rest), *self._calls.finish(cut)]
        found = self._reading(thoughts, pieces)
        if not self._called and (self._said or not self._thought):
            found.text += "".join(self._space)
        return found

    @property
    def _thought(self) -> bool:
        return self._reasoned or (self._thinking is not None and self._thinking.seen)

    def _reading(self, thoughts: str, pieces: Iterable[Piece]) -> Reading:
        texts: list[str] = []
        calls: list[Call] = []
        parts: list[CallPart] = []
        for piece in pieces:
            if isinstance(piece, Thought):
                thoughts, self._reasoned = thoughts + piece.text, True
            elif isinstance(piece, str):
                texts.append(self._say(piece))
            elif isinstance(piece, CallPart):
                if self._most is None or piece.index < self._most:
                    parts.append(piece)
            elif self._left is None or self._left > len(calls):
                self._called = True
                calls.append(piece)
        if self._left is not None:
            self._left -= len(calls)
        return Reading("".join(texts), thoughts, calls, parts)

    def _say(self, text: str) -> str:
        """Returns text without white space at its end, nor before the first word after thoughts or calls."""
        begins = not self._said and (self._called or self._thought)
        if not text.strip():
            if begins:
                self._space.clear()
            else:
                self._space.append(text)
            return ""
        text = "".join([*self._space, text])
        said = (text.lstrip() if begins else text).rstrip()
        self._space, self._said = [text[len(text.rstrip()) :]], True
        return said
