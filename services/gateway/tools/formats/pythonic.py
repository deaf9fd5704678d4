"""Llama 4 and others: [f(a=1, b="x"), g()], with <|python_start|> before it or not. Only literals are arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from services.gateway.tools.call import Call, CallReader, CompleteCall, to_json

TAG = "<|python_start|>"
OPENING = re.compile(r"\[\s*(?:[^\W\d][\w.]*\s*(?:\(|$)|$)")
# Beyond so many commas or characters a list is not reported in parts: each part parses everything before it.
MOST_COMMAS, MOST_PARSED = 256, 16 * 1024


class Pythonic(CallReader):
    begins = (TAG,)
    opens = ("[",)
    closers = ("<|python_end|>",)
    quotes = "\"'"
    separators = ","

    def _open(self) -> None:
        super()._open()
        self._num_read = 0  # commas read
        self._parsed: list[Call] = []
        self._comma = (0, 0)  # position and depth of the last one

    def _take(self, text: str) -> CompleteCall | None:
        tag = len(TAG) if text.startswith(TAG) else 0
        start = len(text) - len(text[tag:].lstrip())
        if start == len(text):
            return None
        if not OPENING.match(text, start):
            return CompleteCall(start or 1)
        end = self._brackets.end(text, start)
        if end is None:
            return self._last_complete(text, start) if self._ended and not self._cut else None
        found = calls_of(text[start:end])
        return CompleteCall(end, found) if found else self._broken(text, end)

    def _sketch(self, text: str) -> Sequence[Call]:
        """Returns the calls up to the last comma before which everything is valid."""
        start = text.find("[", len(TAG) if text.startswith(TAG) else 0)
        for comma, depth in self._brackets.separators[self._num_read : MOST_COMMAS]:
            found = _calls_up_to(text, start, comma, depth) if comma - start < MOST_PARSED else []
            if not found:
                self._num_read = MOST_COMMAS
                break
            self._num_read += 1
            self._parsed, self._comma = found, (comma, depth)
        return self._parsed

    def _last_complete(self, text: str, start: int) -> CompleteCall | None:
        """Returns the complete calls of a list without an end."""
        self._sketch(text)
        commas = [at for at, depth in self._brackets.separators[: self._num_read] if depth == 1]
        found = calls_of(text[start : commas[-1]] + "]") if commas else None
        return CompleteCall(commas[-1], found) if found else None

    def _broken(self, text: str, end: int) -> CompleteCall:
        """Returns the body of a malformed list: the calls that were reported, the last one as written."""
        if not (calls := list(self._sketch(text))):
            return CompleteCall(end)
        comma, depth = self._comma
        if depth == 1:
            return CompleteCall(comma, calls)
        later = (at for at, depth in self._brackets.separators if depth == 1 and at > comma)
        behind = next(later, end - 1)
        rest = text[comma + 1 : behind].strip().removesuffix(")")
        calls[-1] = Call(calls[-1].name, f"{calls[-1].arguments}, {rest}}}")
        return CompleteCall(end if behind == end - 1 else behind, calls)


def _calls_up_to(text: str, start: int, comma: int, depth: int) -> list[Call]:
    """Returns the calls of an incomplete list, the last one as far as it will not change."""
    found = calls_of(text[start:comma] + (")]" if depth == 2 else "]")) or []
    if found and depth == 2:
        found[-1] = Call(found[-1].name, found[-1].arguments.removesuffix("}"))
    return found


def calls_of(text: str) -> list[Call] | None:
    """Returns the calls in a list; None if it is no list of calls."""
    try:
        found = ast.parse(text, mode="eval").body
        if not isinstance(found, ast.List) or not found.elts:
            return None
        return [_call(one) for one in found.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> Call:
    """Raises ValueError: the node is no call, or has arguments other than named literals."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no literal")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    try:
        return Call(ast.unparse(node.func), to_json(arguments))
    except TypeError as error:
        raise ValueError("no JSON") from error
