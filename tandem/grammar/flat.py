"""Lark grammars as one regular expression, for texts within JSON.

A custom tool's text, such as the patch that Codex' apply_patch takes, is a string of JSON in a call's arguments, with
its quotes and line ends escaped. llguidance follows a Lark grammar over the plain text of an answer or between the tags
of a StructTag, but not within such a string: its JSON schemas hold a string to a `pattern` alone.

Rules are inserted where they are named, so no rule may be recursive. What %ignore names may precede every terminal of a
rule, and may stand at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from tandem.grammar.errors import InvalidGrammar

# The most characters of the expression, and the most repetitions of a part.
MAX_PATTERN, MAX_REPEATED = 64 * 1024, 1000
COMMON = r"""
DIGIT: "0".."9"
HEXDIGIT: "a".."f" | "A".."F" | DIGIT
INT: DIGIT+
SIGNED_INT: ["+" | "-"] INT
DECIMAL: INT "." INT? | "." INT
EXPONENT: /[eE]/ SIGNED_INT
FLOAT: INT EXPONENT | DECIMAL EXPONENT?
SIGNED_FLOAT: ["+" | "-"] FLOAT
NUMBER: FLOAT | INT
SIGNED_NUMBER: ["+" | "-"] NUMBER
ESCAPED_STRING: /"(?:[^"\\\n]|\\.)*"/
LCASE_LETTER: "a".."z"
UCASE_LETTER: "A".."Z"
LETTER: UCASE_LETTER | LCASE_LETTER
WORD: LETTER+
CNAME: ("_" | LETTER) ("_" | LETTER | DIGIT)*
WS_INLINE: (" " | /\t/)+
WS: /[ \t\f\r\n]/+
CR: /\r/
LF: /\n/
NEWLINE: (CR? LF)+
"""
TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|->\s*\w+)
    |(?P<string>"(?:[^"\\\n]|\\.)*")(?P<any_case>i?)
    |/(?P<regex>(?!/)(?:[^/\\\n]|\\.)+)/(?P<flags>[imsux]*)
    |(?P<range>\.\.)
    |%import\s+common\s*(?:\.\s*(?P<imported>\w+)(?:\s*->\s*(?P<renamed>\w+))?|\((?P<several>[\w\s,]*)\))
    |(?P<ignore>%ignore)
    |~\s*(?P<times>\d{1,6})(?:\s*\.\.\s*(?P<most>\d{1,6}))?
    |\{(?=[\d,])(?P<least>\d{1,6})?(?P<comma>,)?(?P<bound>\d{1,6})?\}
    |[!?]*(?P<rule>[A-Za-z_]\w*)\s*:
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>[()\[\]|+*?])""",
    re.VERBOSE,
)
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
Token = tuple[str, Any]


def pattern_of(grammar: str) -> str:
    """Returns the regular expression of a Lark grammar. Raises InvalidGrammar."""
    return f"^(?:{_Flat(grammar).whole()})$"


class _Flat:
    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, list[Token]] = {}
        self._ignored: list[list[Token]] = []
        self._made: dict[str, str] = {}
        self._open: list[str] = []
        self._read(grammar)
        self._between = ""
        if self._ignored:
            self._between = f"(?:{'|'.join(_Body(self, body, is_rule=False).all() for body in self._ignored)})*"

    def whole(self) -> str:
        return self.named("start", is_rule=True) + self._between

    def terminal(self, pattern: str, is_rule: bool) -> str:
        return f"(?:{self._between}{pattern})" if is_rule and self._between else pattern

    def named(self, name: str, is_rule: bool) -> str:
        is_terminal = name.lstrip("_")[:1].isupper()
        if name in self._open:
            raise InvalidGrammar(f"x-lark: {name} leads back to itself, which cannot be followed within JSON")
        if name not in self._made:
            if name not in self._rules:
                raise InvalidGrammar(f"x-lark: there is no {name}")
            self._open.append(name)
            self._made[name] = _Body(self, self._rules[name], is_rule=not is_terminal).all()
            self._open.pop()
        return self.terminal(self._made[name], is_rule) if is_terminal else self._made[name]

    def _read(self, grammar: str) -> None:
        body: list[Token] = []
        for kind, value in _tokens(grammar):
            if kind == "rule":
                if value in self._rules:
                    raise InvalidGrammar(f"x-lark: {value} is there twice")
                body = self._rules[value] = []
            elif kind == "ignore":
                self._ignored.append(body := [])
            elif kind == "import":
                name, known = value
                self._rules[name] = _common(known)
            else:
                body.append((kind, value))


class _Body:
    """The right side of a rule, read from left to right."""

    def __init__(self, of: _Flat, tokens: Sequence[Token], is_rule: bool) -> None:
        self._of, self._tokens, self._is_rule = of, tokens, is_rule
        self._at = 0

    def all(self) -> str:
        made = self._alternatives()
        if self._at < len(self._tokens):
            raise InvalidGrammar(f"x-lark: {self._tokens[self._at][1]!r} is out of place")
        return made

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._takes("mark", "|"):
            found.append(self._sequence())
        return f"(?:{_joined(found, '|')})"

    def _sequence(self) -> str:
        found = []
        while (made := self._one()) is not None:
            found.append(made + self._repeated())
        return _joined(found)

    def _one(self) -> str | None:
        kind, value = self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")
        if kind == "string":
            self._at += 1
            return self._of.terminal(self._text(*value), self._is_rule)
        if kind == "regex":
            self._at += 1
            return self._of.terminal(value, self._is_rule)
        if kind == "name":
            self._at += 1
            return self._of.named(value, self._is_rule)
        for begin, end, after in (("(", ")", ""), ("[", "]", "?")):
            if self._takes("mark", begin):
                made = self._alternatives()
                if not self._takes("mark", end):
                    raise InvalidGrammar(f"x-lark: a {begin} is not closed")
                return made + after if not after else f"(?:{made}){after}"
        return None

    def _text(self, text: str, any_case: bool) -> str:
        if not self._takes("range", ".."):
            escaped = SPECIAL.sub(r"\\\g<0>", text)
            return f"(?i:{escaped})" if any_case else f"(?:{escaped})"
        kind, last = self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")
        self._at += 1
        if kind != "string" or len(text) != 1 or len(last[0]) != 1:
            raise InvalidGrammar("x-lark: a range goes from one character to another")
        first, last = (SPECIAL.sub(r"\\\g<0>", one) for one in (text, last[0]))
        return f"[{first}-{last}]"

    def _repeated(self) -> str:
        kind, value = self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")
        if kind == "repeat" or (kind == "mark" and value in "+*?"):
            self._at += 1
            return str(value)
        return ""

    def _takes(self, kind: str, value: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at] == (kind, value)
        self._at += found
        return found


def _joined(parts: Sequence[str], between: str = "") -> str:
    if sum(map(len, parts)) + len(parts) > MAX_PATTERN:
        raise InvalidGrammar(f"x-lark: has more than {MAX_PATTERN} characters with its rules put into each other")
    return between.join(parts)


def _tokens(grammar: str) -> Iterator[Token]:
    at = 0
    while at < len(grammar):
        found = TOKEN.match(grammar, at)
        if found is None:
            line = grammar.count("\n", 0, at) + 1
            raise InvalidGrammar(f"x-lark: {grammar[at : at + 16]!r} in line {line} cannot be followed within JSON")
        at = found.end()
        yield from _token(found.groupdict())


def _token(said: dict[str, str | None]) -> Iterator[Token]:
    if said["string"] is not None:
        yield "string", (_unescaped(said["string"]), bool(said["any_case"]))
    elif said["regex"] is not None:
        yield "regex", f"(?{said['flags']}:{said['regex']})"
    elif said["imported"] is not None:
        yield "import", (said["renamed"] or said["imported"], said["imported"])
    elif said["several"] is not None:
        for name in re.findall(r"\w+", said["several"]):
            yield "import", (name, name)
    elif said["times"] is not None:
        yield "repeat", _times(said["times"], said["most"] or said["times"])
    elif said["least"] is not None or said["comma"] is not None:
        yield "repeat", _times(said["least"] or "0", said["bound"] or ("" if said["comma"] else str(said["least"])))
    else:
        for kind in ("range", "ignore", "rule", "name", "mark"):
            if said[kind] is not None:
                yield kind, said[kind]


def _times(least: str, most: str) -> str:
    if max(int(least), int(most or 0)) > MAX_REPEATED or (most and int(most) < int(least)):
        raise InvalidGrammar(f"x-lark: {least} to {most} times, but at most {MAX_REPEATED}, and the smaller first")
    return f"{{{least},{most}}}"


def _unescaped(literal: str) -> str:
    try:
        return str(json.loads(re.sub(r"\\x(?=[0-9a-fA-F]{2})", r"\\u00", literal)))
    except ValueError:
        raise InvalidGrammar(f"x-lark: {literal[:32]} is no text") from None


@cache
def _commons() -> dict[str, list[Token]]:
    found: dict[str, list[Token]] = {}
    body: list[Token] = []
    for kind, value in _tokens(COMMON):
        if kind == "rule":
            body = found[value] = []
        else:
            body.append((kind, value))
    return found


def _common(name: str) -> list[Token]:
    if name not in _commons():
        raise InvalidGrammar(f"x-lark: {name} is not in common")
    return _inlined(_commons()[name], _commons())


def _inlined(body: list[Token], found: dict[str, list[Token]]) -> list[Token]:
    """Returns a common rule's body with all names inserted, so that a rule of the same name changes nothing."""
    made: list[Token] = []
    for kind, value in body:
        inner = [("mark", "("), *_inlined(found[value], found), ("mark", ")")] if kind == "name" else [(kind, value)]
        made += inner
    return made
