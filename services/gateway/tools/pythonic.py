"""Llama 4 and others: [f(a=1, b="x"), g()], with <|python_start|> before it or not. Only literals are arguments."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from services.gateway.tools.call import Call, CallReader, Taken, to_json

TAG = "<|python_start|>"


class Pythonic(CallReader):
    begins = (TAG,)
    opens = ("[",)
    closers = ("<|python_end|>",)
    quotes = "\"'"
    separators = ","

    def _open(self) -> None:
        super()._open()
        self._parsed = (0, list[Call]())  # up to which comma, and what

    def _take(self, text: str) -> Taken | None:
        tag = len(TAG) if text.startswith(TAG) else 0
        start = len(text) - len(text[tag:].lstrip())
        if start == len(text):
            return None
        if text[start] != "[":
            return Taken(start)
        end = self._brackets.end(text, start)
        if end is None:
            return None
        return Taken(end, calls_of(text[start:end]) or ())

    def _sketch(self, text: str) -> Sequence[Call]:
        """Up to the last comma between calls or between arguments of one."""
        start = text.find("[", len(TAG) if text.startswith(TAG) else 0)
        comma, depth = self._brackets.separator
        if start >= 0 and comma != self._parsed[0]:
            found = calls_of(text[start:comma] + (")]" if depth == 2 else "]")) or []
            if found and depth == 2:
                found[-1] = Call(found[-1].name, found[-1].arguments.removesuffix("}"))
            self._parsed = comma, found
        return self._parsed[1]


def calls_of(text: str) -> list[Call] | None:
    """None where it is no list of calls."""
    try:
        found = ast.parse(text, mode="eval").body
        if not isinstance(found, ast.List) or not found.elts:
            return None
        return [_call(one) for one in found.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> Call:
    """
    Raises:
        ValueError: it is no call, or has other arguments than named literals.
    """
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
