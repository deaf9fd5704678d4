"""The common part of all formats of tool calls.

    text ... begin  body  closer  text ...
             └─ held until the body is complete; meanwhile what is certain of its calls comes in parts

Text that cannot be a part of a call passes through at once. A body that turns out not to be a call is text, too. Once
parts have reported a call it is one, for they cannot be taken back: if what follows is not as it should be, its
arguments come as they are written. So an answer is the same whole and streamed, wherever it is cut. Only its arguments'
end makes it a whole one: a body whose arguments the model never ended is text; nothing, where max_tokens has cut it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic_core import from_json

from services.gateway.tools.brackets import Brackets

STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f]")
SURROGATE = re.compile("[\ud800-\udfff]")
# Parameters of the offered tools, by name.
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object, as text
    index: int = 0  # among the answer's calls


@dataclass(frozen=True, slots=True)
class CallPart:
    """A new part of an answer's call `index`: its name in the first part, and more of its arguments."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


Piece = str | Thought | Call | CallPart


def joined_parts(parts: Sequence[CallPart]) -> list[CallPart]:
    """Returns one part for each call: clients misread several parts of one call in one delta."""
    found: dict[int, CallPart] = {}
    for part in parts:
        before = found.get(part.index)
        found[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
    return list(found.values())


@dataclass(frozen=True, slots=True)
class CompleteCall:
    """A complete body of `length` characters; without calls if it turned out to be text."""

    length: int
    calls: Sequence[Call] = ()


class CallFormat(ABC):
    """Reads one answer in one format."""

    begins: ClassVar[tuple[str, ...]] = ()  # marks that begin a call anywhere
    opens: Sequence[str] = ()  # marks that begin a call at the answer's beginning
    closers: ClassVar[tuple[str, ...]] = ()  # marks after a call, which are not shown
    parts: ClassVar[tuple[str, ...]] = ()  # marks within a call
    messages: ClassVar[Mapping[str, str]] = {}  # marks of messages by name, in formats with messages
    ends_thinking: ClassVar[tuple[str, ...]] = ()  # a call within thoughts ends them
    strict_tag: ClassVar[tuple[str, str] | None] = None  # text around the arguments of a call of {name}
    id_form: ClassVar[str] = "call_{:.24}"  # form of a call's id, made of a unique one

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Returns the marks that may be special tokens of the model."""
        return (*cls.begins, *cls.parts, *cls.closers)

    @property
    def within_thoughts(self) -> bool:
        return False

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Returns the text and calls that are certain now, in order; a call follows its parts."""

    @abstractmethod
    def finish(self, cut: bool = False) -> list[Piece]:
        """Returns the rest after the answer's end. `cut`: the answer was cut off."""


class CallReader(CallFormat):
    """Reads text that contains calls."""

    quotes: ClassVar[str] = '"'
    separators: ClassVar[str] = ""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._held = ""
        self._inside = False
        self._closing = False
        self._ended = False  # the answer ended
        self._cut = False  # by being cut off
        self._silent = True  # only white space so far
        self._brackets = Brackets(self.quotes, self.separators)
        self._num_calls = 0
        self._begun: list[Call] = []  # the body's calls as far as reported in parts

    def _open(self) -> None:
        """Begin a body."""
        self._inside, self._brackets, self._begun = True, Brackets(self.quotes, self.separators), []

    @abstractmethod
    def _take(self, text: str) -> CompleteCall | None:
        """Returns the body that `text` begins with; None while incomplete."""

    def _sketch(self, text: str) -> Sequence[Call]:
        """Returns the calls that an incomplete body has begun, each as far as it will not change."""
        return ()

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        return self._pieces()

    def finish(self, cut: bool = False) -> list[Piece]:
        self._ended, self._cut = True, cut
        pieces = self._pieces()
        if self._inside and not (cut and (self._begun or self._marked(self._held))):
            self._say(self._unfinished(), pieces)
        self._held = ""
        return pieces

    def _unfinished(self) -> str:
        """Returns the part of an uncompleted body that is text."""
        return self._held

    def _marked(self, text: str) -> bool:
        """True if the body begins with a mark that only calls have."""
        return text.startswith(self.begins)

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Move what is certain from the held text to pieces. Returns False if more text is needed first."""
        if self._closing:
            return self._close()
        if not self._inside:
            return self._pass_text(pieces)
        taken = self._take(self._held)
        self._begin(self._sketch(self._held) if taken is None else taken.calls, pieces)
        if taken is None:
            return False
        if taken.calls:
            pieces += [replace(call, index=self._num_calls + i) for i, call in enumerate(taken.calls)]
        else:
            self._say(self._held[: taken.length], pieces)
        self._num_calls += max(len(taken.calls), len(self._begun))
        self._held = self._held[taken.length :]
        self._inside, self._closing = False, bool(taken.calls)
        return True

    def _begin(self, calls: Sequence[Call], pieces: list[Piece]) -> None:
        """Add the new parts of a body's calls to pieces."""
        for i, call in enumerate(calls):
            known = self._begun[i] if i < len(self._begun) else None
            new = call.arguments[len(known.arguments) :] if known else call.arguments
            if new or known is None:
                pieces.append(CallPart(self._num_calls + i, "" if known else call.name, new))
        if calls:
            self._begun = list(calls)

    def _pass_text(self, pieces: list[Piece]) -> bool:
        """Pass text up to the next begin mark, or as far as none can have begun."""
        text = self._held
        opens = tuple(self.opens) if self._silent else ()
        start = len(text) - len(text.lstrip())
        if not opens or not text.startswith(opens, start):
            found = [at for begin in self.begins if (at := text.find(begin)) >= 0]
            start = min(found, default=-1)
        if start >= 0:
            self._open()
        else:
            start = len(text) - (0 if self._ended else may_begin(text, self.begins))
        if not self._ended and not self._inside and _may_open(text, start, opens):
            start = 0  # the beginning may still be a call
        self._say(text[:start], pieces)
        self._held = text[start:]
        return self._inside

    def _close(self) -> bool:
        """Drop marks that may follow a call."""
        rest = self._held.lstrip()
        for closer in self.closers:
            if rest.startswith(closer):
                self._held, self._closing = rest[len(closer) :], False
                return True
            if closer.startswith(rest) and (rest or not self._ended):
                if self._ended:
                    self._held = ""
                return False
        self._closing = False
        return True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._silent = self._silent and not text.strip()
            pieces.append(text)


def _may_open(text: str, start: int, opens: Sequence[str]) -> bool:
    """True if nothing, or only a part of one of `opens`, precedes `start`."""
    said = text[:start].lstrip()
    return any(mark.startswith(said) for mark in opens) if said else bool(opens)


def may_begin(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins one of `marks`."""
    for length in range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def begun(mark: str) -> str:
    """Returns a pattern that matches a mark or any beginning of it."""
    return "(?:".join(map(re.escape, mark)) + ")?" * (len(mark) - 1)


def call_of(value: Any) -> Call | None:
    """Returns the call in {"name": ..., "arguments" or "parameters": {...}}; None if it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    return Call(name, to_json(arguments)) if isinstance(arguments, dict) else None


def json_text(text: str) -> str:
    """Returns a model's JSON as strict JSON: unchanged, but with control characters in strings escaped."""
    return STRING.sub(_escaped, text) if CONTROL.search(text) else text


def _escaped(string: re.Match[str]) -> str:
    return CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], string[0])


def parsed(text: str) -> Any:
    """Returns parsed JSON; None if it is malformed or has a lone surrogate, which cannot be sent."""
    try:
        found = json.loads(text, strict=False, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError):
        return None


def may_be_json(text: str) -> bool:
    """True while the text could become JSON."""
    text = json_text(text)
    try:
        from_json(text, allow_partial=True, allow_inf_nan=False)
        json.loads(text)
    except json.JSONDecodeError as error:  # `raw_decode` accepts anything after a complete value
        return error.pos == len(text) or not error.msg.startswith("Expecting ',' delimiter")
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def to_json(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isascii() or not SURROGATE.search(text) else json.dumps(arguments)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
