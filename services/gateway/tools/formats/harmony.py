"""gpt-oss: messages, whose headers mark them as thoughts, answers or calls.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends behind the first <|start|>assistant. A mark ends a message only where the next one begins behind it, or
nothing follows: so an answer may speak of marks. What is no header is text.
"""

from __future__ import annotations

import re

from services.gateway.tools.brackets import Brackets
from services.gateway.tools.call import Call, CallFormat, CallPart, Piece, Schemas, Thought, begun, json_text
from services.gateway.tools.formats.headed import Part, mark, partly, whole

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = {"start": START, "channel": CHANNEL, "constrain": CONSTRAIN, "message": MESSAGE, "end": ENDS[0]}
ASSISTANT = f"{START}assistant"
S = r"\s{0,16}"
ENDED = "(?:" + "|".join(map(re.escape, ENDS)) + ")"
MAY_BE_ENDED = "(?:" + "|".join(map(begun, ENDS)) + ")"


def _to(name: str) -> Part:
    word = r"\s{0,8}to=[\w.-]"
    return rf"(?:\s{{0,8}}to=(?P<{name}>[\w.-]{{1,256}}))?", rf"(?:\s{{0,8}}(?:{begun('to=')})?|{word}{{1,256}})"


SPACE = (S, S)
ROLE = (SPACE, (f"{ENDED}?", MAY_BE_ENDED), SPACE, (f"(?:{re.escape(ASSISTANT)})?", begun(ASSISTANT)))
HEAD = (
    *ROLE, _to("first"), SPACE, mark(CHANNEL), (r"(?P<channel>\w{1,32})", r"\w{0,32}"), _to("second"), SPACE,
    (f"(?:{re.escape(CONSTRAIN)})?", begun(CONSTRAIN)), SPACE, (r"\w{0,32}", r"\w{0,32}"), SPACE, mark(MESSAGE),
)  # fmt: skip
HEADER, MAY_BE_HEADER = whole(*HEAD), partly(HEAD)
OTHER = re.compile(
    rf"(?:{S}{ENDED})?(?:{S}{re.escape(ASSISTANT)})?"
    rf"(?:{S}{re.escape(CHANNEL)}(?:(?P<channel>analysis|commentary|final)\b)?)?"
)
END = re.compile(rf"{ENDED}{S}(?={re.escape(ASSISTANT)})")
LAST_END = re.compile(rf"{ENDED}{S}(?:{begun(ASSISTANT)})?$")
MAY_END = re.compile(rf"{LAST_END.pattern}|{MAY_BE_ENDED}$")
LONGEST_END = 64
OBJECT, MAY_BE_OBJECT = re.compile(r"\s*\{\s*[\"}]"), re.compile(r"\s*(?:\{\s*)?")
NOBODY = ("assistant", "user", "all")  # recipients other than tools
HEADING, TEXT, THOUGHT, CALL, HIDDEN = "heading", "text", "thought", "call", "hidden"


class Harmony(CallFormat):
    begins = (CHANNEL,)
    parts = (START, CONSTRAIN, MESSAGE)
    closers = ENDS
    messages = MARKS

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._held, self._ended = "", False
        self._state = HEADING
        self._name = ""
        self._told = 0  # reported characters of a call's arguments; -1: its name neither
        self._num_calls = 0
        self._said = {TEXT: False, THOUGHT: False}  # kinds of text in earlier messages
        self._begun = False  # the present message has text

    @property
    def within_thoughts(self) -> bool:
        return self._state == THOUGHT

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        self._ended = True
        pieces = self.feed("")
        if self._state == CALL and not cut:
            self._say(self._held, TEXT, pieces)
        elif self._state == HEADING and self._held:
            rest = self._held[OTHER.match(self._held).end() :]  # type: ignore[union-attr]
            is_header = "<|" in self._held or rest.lstrip().startswith("to=")
            self._say("" if cut and is_header else self._held if is_header and rest.strip() else rest, TEXT, pieces)
        self._held = ""
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what is certain from the front of the held text; False when more of it must come first."""
        if self._state == HEADING:
            return self._head()
        return self._call(pieces) if self._state == CALL else self._pass_text(pieces)

    def _head(self) -> bool:
        header = HEADER.match(self._held)
        if header is None and MAY_BE_HEADER.fullmatch(self._held):
            return False
        to = (header["second"] or header["first"] or "") if header else ""
        found = header or OTHER.match(self._held)
        assert found is not None
        self._state = self._kind(found["channel"] or "", "" if to in NOBODY else to)
        self._held, self._begun = self._held[found.end() :], False
        return True

    def _kind(self, channel: str, to: str) -> str:
        if to.startswith("functions.") or to in self._schemas:
            self._name, self._told = to.removeprefix("functions."), -1
            self._brackets, self._looked = Brackets('"'), 0
            return CALL if self._schemas else TEXT
        return HIDDEN if to else THOUGHT if channel == "analysis" else TEXT

    def _pass_text(self, pieces: list[Piece]) -> bool:
        """Pass text up to the mark that ends the message, or as far as none can have begun."""
        text, end = self._held, END.search(self._held)
        hold = None if end else (LAST_END if self._ended else MAY_END).search(text)
        stop = end.start() if end else hold.start() if hold else len(text)
        self._say(text[:stop], self._state, pieces)
        self._held = text[end.end() :] if end else "" if self._ended else text[stop:]
        if end:
            self._said[self._state], self._state = self._said.get(self._state, False) or self._begun, HEADING
        return bool(end)

    def _say(self, text: str, kind: str, pieces: list[Piece]) -> None:
        if not text or kind == HIDDEN:
            return
        text = "\n" + text if self._said[kind] and not self._begun else text
        self._begun = True
        pieces.append(Thought(text) if kind == THOUGHT else text)

    def _call(self, pieces: list[Piece]) -> bool:
        text = self._held
        if not OBJECT.match(text):
            if self._ended or not MAY_BE_OBJECT.fullmatch(text):
                self._state = TEXT
                return True
            return False
        end = self._end(text)
        hold = None if end is not None else MAY_END.search(text, max(0, len(text) - LONGEST_END))
        arguments = json_text(text[: hold.start() if hold else end].lstrip())
        if self._told < len(arguments):
            name = self._name if self._told < 0 else ""
            pieces.append(CallPart(self._num_calls, name, arguments[max(self._told, 0) :]))
            self._told = len(arguments)
        if end is None:
            return False
        pieces.append(Call(self._name, arguments, self._num_calls))
        self._num_calls += 1
        self._held, self._state = text[end:], HEADING
        return True

    def _end(self, text: str) -> int | None:
        """Returns the end of the arguments: their closing bracket, or the end of the message."""
        while found := END.search(text, self._looked):
            end = self._brackets.end(text[: found.start()], 0)
            if end is not None or not self._brackets.quoted:
                return found.start() if end is None else end
            self._looked = found.end()
        self._looked = max(self._looked, len(text) - LONGEST_END)
        return self._brackets.end(text, 0)
