"""Finds the end of a bracketed text while it grows, examining each character once."""

from __future__ import annotations

import re


class Brackets:
    def __init__(self, quotes: str, separators: str = "") -> None:
        """`quotes` are the characters that begin and end a string."""
        self._marks = re.compile(rf"\\.?|[()\[\]{{}}{quotes}{separators}]", re.DOTALL)
        self.separators: list[tuple[int, int]] = []  # (position, depth) of separators at most two brackets deep
        self._at = 0
        self._depth = 0
        self._quote = ""

    @property
    def quoted(self) -> bool:
        """True if the text ends within a string."""
        return bool(self._quote)

    def end(self, text: str, start: int) -> int | None:
        """Returns the position after the bracket that closes the one at `start`; None yet. `text` may only grow."""
        for found in self._marks.finditer(text, max(start, self._at)):
            mark = found[0]
            if mark == "\\":  # the escaped character is still to come
                self._at = found.start()
                return None
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            elif mark in "([{":
                self._depth += 1
            elif mark in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return found.end()
            elif self._depth <= 2:
                self.separators.append((found.start(), self._depth))
        self._at = len(text)
        return None
