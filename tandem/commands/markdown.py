"""Markdown on a terminal while it is still being written: bold, code, headings and bullets; all else as it is.

feed   a part of the text -> what can be shown of it: a mark that may go on with the next part waits for that
end    what still waits
"""

from __future__ import annotations

import re

from rich.style import Style
from rich.text import Text

CODE, HEADING, BOLD = Style(color="cyan"), Style(bold=True, underline=True), Style(bold=True)
# At a line's beginning: a fence's whole line, a heading's marks, a bullet; and what may become one of these.
_FENCE, _HEADING, _BULLET = re.compile(r" *```[^\n]*\n"), re.compile(r"#{1,6} +"), re.compile(r"( *)[-*+] +(?=[^ ])")
_UNDECIDED = re.compile(r" *(`{0,2}|```[^\n]*|#{0,6} *|[-*+] *)$")
_INLINE, _VERBATIM = re.compile(r"\*\*|`|\n|\*(?=[^*])|[^*`\n]+"), re.compile(r"[^\n]+|\n")


class Markdown:
    """One answer's text."""

    def __init__(self) -> None:
        self._held = ""
        self._at_start, self._fenced = True, False
        self._heading, self._bold, self._code = False, False, False

    def feed(self, part: str) -> Text:
        self._held += part
        shown = Text()
        while self._held and (step := self._step()) is not None:
            shown.append_text(step)
        return shown

    def end(self) -> Text:
        left, self._held = self._held, ""
        return Text(left, self._style())

    def _step(self) -> Text | None:
        """The next piece; None while it is not clear what it is."""
        if self._at_start:
            if _UNDECIDED.match(self._held):
                return None
            self._at_start = False
            if (begun := self._begun()) is not None:
                return begun
        found = (_VERBATIM if self._fenced else _INLINE).match(self._held)
        return None if found is None else self._inline(self._taken(found))

    def _begun(self) -> Text | None:
        """A line's mark."""
        if fence := _FENCE.match(self._held):
            self._taken(fence)
            self._fenced, self._at_start = not self._fenced, True
            return Text()
        if not self._fenced and (heading := _HEADING.match(self._held)):
            self._taken(heading)
            self._heading = True
            return Text()
        if not self._fenced and (bullet := _BULLET.match(self._held)):
            self._taken(bullet)
            return Text(f"{bullet[1]}• ")
        return None

    def _inline(self, piece: str) -> Text:
        if piece == "\n":  # a mark that nobody closed ends with its line
            self._at_start, self._heading, self._bold, self._code = True, False, False, False
        elif piece == "**" and not self._code and not self._fenced:
            self._bold = not self._bold
            return Text()
        elif piece == "`" and not self._fenced:
            self._code = not self._code
            return Text()
        return Text(piece, self._style())

    def _style(self) -> Style:
        if self._fenced or self._code:
            return CODE
        return HEADING if self._heading else BOLD if self._bold else Style.null()

    def _taken(self, found: re.Match[str]) -> str:
        self._held = self._held[found.end() :]
        return found[0]
