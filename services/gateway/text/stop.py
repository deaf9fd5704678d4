"""Stop strings: passes text on until one of them is complete.

    feed("Hello wor")  -> "Hello "         "wor" may begin "world!", so it is held back
    feed("ld")         -> ""               still may
    feed("ly")         -> "worldly"        it did not

The string that is complete first wins, and of two that end together the longer one, so that the answer does not
depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches one answer's text for stop strings."""

    def __init__(self, stops: Sequence[str], shown: bool = False) -> None:
        """`shown`: the stop string that ends the answer is part of it."""
        self._stops = [stop for stop in stops if stop]
        self._shown = shown
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that may be shown now. Once `matched` is set the answer has ended and nothing more is
        returned."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        if (end := self._match(text)) is not None:
            self._held = ""
            return text[:end]
        shown = len(text) - self._may_begin(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Returns the text still held back when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> int | None:
        """Returns the answer's end by the stop string that is complete first; None if none is."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        self.matched = best[2]
        return best[0] if self._shown else best[1]

    def _may_begin(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop.startswith(text[-length:]):
                    longest = length
                    break
        return longest
