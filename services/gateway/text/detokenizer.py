"""Token ids to text, one token at a time.

    bytes of the token -> UTF-8 decoder -> whole characters

No part of a character is shown: bytes of an unfinished one wait for the next token, or for `flush`. All pieces of an
answer put together are what decoding it at once behind its prompt would give, but for one wanted difference: where
SentencePiece's byte tokens in a row are no UTF-8, the library makes a U+FFFD of each, and whole characters among them
are kept here. The space that the library leaves out of a text's beginning is there: an answer continues its prompt.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Turns one answer's tokens into text."""

    __slots__ = ("_decoder", "_texts", "_token_bytes", "_unfinished")

    def __init__(self, token_bytes: Callable[[int], bytes], texts: dict[int, str]) -> None:
        """`texts`: cache of the texts of tokens that are whole characters, shared by all answers."""
        self._token_bytes, self._texts = token_bytes, texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = False

    def feed(self, token_id: int) -> str:
        """Returns the text that is certain after this token."""
        if not self._unfinished and (known := self._texts.get(token_id)) is not None:
            return known
        began_whole = not self._unfinished
        text = self._decoder.decode(self._token_bytes(token_id))
        self._unfinished = bool(self._decoder.getstate()[0])
        if began_whole and not self._unfinished:
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        """Returns the remaining text after the last token."""
        return self._decoder.decode(b"", final=True)
