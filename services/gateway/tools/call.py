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
# The parameters of each tool that was offered, by its name.
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object, as text
    index: int = 0  # among the answer's


@dataclass(frozen=True, slots=True)
class CallPart:
    """A new part of call `index` of an answer: its name, once, and more of its arguments."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


Piece = str | Thought | Call | CallPart


def joined_parts(parts: Sequence[CallPart]) -> list[CallPart]:
    """One of each call: clients take a second one of the same index and delta for the same again, or for another."""
    found: dict[int, CallPart] = {}
    for part in parts:
        before = found.get(part.index)
        found[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
    return list(found.values())


@dataclass(frozen=True, slots=True)
class CompleteCall:
    """A complete body: `length` characters from its begin; no calls where it was text after all."""

    length: int
    calls: Sequence[Call] = ()


class CallFormat(ABC):
    """One answer in one format."""

    begins: ClassVar[tuple[str, ...]] = ()  # a call begins with these, anywhere
    opens: Sequence[str] = ()  # and with these, as the first that is said
    closers: ClassVar[tuple[str, ...]] = ()  # may follow a call, and are not shown
    parts: ClassVar[tuple[str, ...]] = ()  # marks within a call
    messages: ClassVar[Mapping[str, str]] = {}  # marks of messages, by name, where thoughts and answers are such
    ends_thinking: ClassVar[tuple[str, ...]] = ()  # a call within thoughts ends them
    strict_tag: ClassVar[tuple[str, str] | None] = None  # around the arguments of a call of {name}, in its own format
    id_form: ClassVar[str] = "call_{:.24}"  # of a call's id, made of one that is unique

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Marks that may be special tokens of the model."""
        return (*cls.begins, *cls.parts, *cls.closers)

    @property
    def within_thoughts(self) -> bool:
        return False

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Text and calls that are certain now, in order: each call behind its parts."""

    @abstractmethod
    def finish(self, cut: bool = False) -> list[Piece]:
        """Returns the rest, when nothing follows. `cut`: the model would have gone on."""


class CallReader(CallFormat):
    """Text with calls in it."""

    quotes: ClassVar[str] = '"'
    separators: ClassVar[str] = ""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._held = ""
        self._inside = False
        self._closing = False
        self._ended = False  # nothing follows
        self._cut = False  # although the model would have gone on
        self._silent = True  # nothing but white space has been said
        self._brackets = Brackets(self.quotes, self.separators)
        self._num_calls = 0
        self._begun: list[Call] = []  # of the body, as far as parts have reported them

    def _open(self) -> None:
        """A body begins."""
        self._inside, self._brackets, self._begun = True, Brackets(self.quotes, self.separators), []

    @abstractmethod
    def _take(self, text: str) -> CompleteCall | None:
        """The body that `text` begins with; None while it is not complete."""

    def _sketch(self, text: str) -> Sequence[Call]:
        """The calls that `text`, a body that is not complete, has begun: of each so much as will not change."""
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
        """Returns what is text of a body that the model has not completed."""
        return self._held

    def _marked(self, text: str) -> bool:
        """True where a body begins with what nothing but a call does."""
        return text.startswith(self.begins)

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what is certain from the front of the held text; False when more of it must come first."""
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
        """Tell what is new of a body's calls."""
        for i, call in enumerate(calls):
            known = self._begun[i] if i < len(self._begun) else None
            new = call.arguments[len(known.arguments) :] if known else call.arguments
            if new or known is None:
                pieces.append(CallPart(self._num_calls + i, "" if known else call.name, new))
        if calls:
            self._begun = list(calls)

    def _pass_text(self, pieces: list[Piece]) -> bool:
        """Up to the next begin, or as far as no begin can have begun."""
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
            start = 0  # what is said first may still be a call
        self._say(text[:start], pieces)
        self._held = text[start:]
        return self._inside

    def _close(self) -> bool:
        """Drop what may follow a call."""
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
    """True if nothing is said before `start`, or only what one of `opens` begins with."""
    said = text[:start].lstrip()
    return any(mark.startswith(said) for mark in opens) if said else bool(opens)


def may_begin(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `marks`."""
    for length in range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def begun(mark: str) -> str:
    """A pattern of what begins a mark, or is it."""
    return "(?:".join(map(re.escape, mark)) + ")?" * (len(mark) - 1)


def call_of(value: Any) -> Call | None:
    """From {"name": ..., "arguments" or "parameters": {...}}."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    return Call(name, to_json(arguments)) if isinstance(arguments, dict) else None


def json_text(text: str) -> str:
    """JSON as a model writes it, with the control characters in its strings escaped: as it stands, but strict JSON."""
    return STRING.sub(_escaped, text) if CONTROL.search(text) else text


def _escaped(string: re.Match[str]) -> str:
    return CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], string[0])


def parsed(text: str) -> Any:
    """JSON, or None; half of a surrogate pair is in no text that can be sent."""
    try:
        found = json.loads(text, strict=False, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError):
        return None


def may_be_json(text: str) -> bool:
    """True while more text could make it JSON."""
    text = json_text(text)
    try:
        from_json(text, allow_partial=True, allow_inf_nan=False)
        json.loads(text)
    except json.JSONDecodeError as error:  # the parser above takes anything at all behind a complete value
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
