"""What all formats of tool calls have in common.

    text ... begin  body  closer  text ...
             └─ held until the body is complete ─┘

Text that cannot be a part of a call passes through at once. A body that turns out not to be a call is text, too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from services.gateway.tools.brackets import Brackets

# The parameters of each tool that was offered, by its name.
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object, as text


@dataclass(frozen=True, slots=True)
class Taken:
    """A complete body: `length` characters from its begin; no calls where it was text after all."""

    length: int
    calls: Sequence[Call] = ()


class CallReader(ABC):
    """One answer in one format."""

    begins: ClassVar[tuple[str, ...]] = ()  # a call begins with these, anywhere
    opens: ClassVar[tuple[str, ...]] = ()  # and with these, as the first that is said
    closers: ClassVar[tuple[str, ...]] = ()  # may follow a call, and are not shown
    parts: ClassVar[tuple[str, ...]] = ()  # marks within a call
    ends_thinking: ClassVar[tuple[str, ...]] = ()  # a call within thoughts ends them
    strict_tag: ClassVar[tuple[str, str] | None] = None  # around the arguments of a call of {name}, in its own format
    quotes: ClassVar[str] = '"'
    id_form: ClassVar[str] = "call_{:.24}"  # of a call's id, made of one that is unique

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._held = ""
        self._inside = False
        self._closing = False
        self._silent = True  # nothing but white space has been said
        self._brackets = Brackets(self.quotes)

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """What may be a special token of the model's."""
        return (*cls.begins, *cls.parts, *cls.closers)

    @abstractmethod
    def _take(self, text: str) -> Taken | None:
        """The body that `text` begins with; None while it is not complete."""

    def feed(self, text: str) -> list[str | Call]:
        """Text and calls that are certain now, in order."""
        self._held += text
        return self._pieces(ended=False)

    def finish(self) -> list[str | Call]:
        """The rest, when nothing follows. A marked call that was cut off is dropped: it is neither call nor text."""
        pieces = self._pieces(ended=True)
        if self._inside and not self._held.startswith(self.begins):
            pieces.append(self._held)
        self._held = ""
        return pieces

    def _pieces(self, ended: bool) -> list[str | Call]:
        pieces: list[str | Call] = []
        while self._held and self._advance(pieces, ended):
            pass
        return pieces

    def _advance(self, pieces: list[str | Call], ended: bool) -> bool:
        """Take what is certain from the front of the held text; False when more of it must come first."""
        if self._closing:
            return self._close(ended)
        if not self._inside:
            return self._pass_text(pieces, ended)
        taken = self._take(self._held)
        if taken is None:
            return False
        if taken.calls:
            pieces += taken.calls
        else:
            self._say(self._held[: taken.length], pieces)
        self._held = self._held[taken.length :]
        self._inside, self._closing = False, bool(taken.calls)
        return True

    def _pass_text(self, pieces: list[str | Call], ended: bool) -> bool:
        """Up to the next begin, or as far as no begin can have begun."""
        text = self._held
        opens = self.opens if self._silent else ()
        start = len(text) - len(text.lstrip())
        if not opens or not text.startswith(opens, start):
            found = [at for begin in self.begins if (at := text.find(begin)) >= 0]
            start = min(found, default=-1)
        if start >= 0:
            self._inside, self._brackets = True, Brackets(self.quotes)
        else:
            start = len(text) - (0 if ended else may_begin(text, self.begins))
        if not ended and opens and not text[:start].strip():
            start = start if self._inside else 0  # what is said first may still be a call
        self._say(text[:start], pieces)
        self._held = text[start:]
        return self._inside

    def _close(self, ended: bool) -> bool:
        """Drop what may follow a call."""
        rest = self._held.lstrip()
        for closer in self.closers:
            if rest.startswith(closer):
                self._held, self._closing = rest[len(closer) :], False
                return True
            if closer.startswith(rest) and (rest or not ended):
                if ended:
                    self._held = ""
                return False
        self._closing = False
        return True

    def _say(self, text: str, pieces: list[str | Call]) -> None:
        if text:
            self._silent = self._silent and not text.strip()
            pieces.append(text)


def may_begin(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `marks`."""
    for length in range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def call_of(value: Any) -> Call | None:
    """From {"name": ..., "arguments" or "parameters": {...}}."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    return Call(name, to_json(arguments)) if isinstance(arguments, dict) else None


def parsed(text: str) -> Any:
    """JSON, or None."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def to_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
