"""Token ids to text, one token at a time.

    bytes of the token -> UTF-8 decoder -> whole characters       (byte-level tokenizers: exact)
    context + new ids  -> decode both   -> what the new ids add   (all others)

Neither shows a part of a character: bytes of an unfinished one wait for the next token, or for `flush`. All pieces of
an answer put together are what decoding it at once would give.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_PENDING = 32


class Detokenizer(Protocol):
    """One answer's text."""

    def feed(self, token_id: int) -> str:
        """The text that is certain now."""

    def flush(self) -> str:
        """The rest, when no token follows."""


class ByteDetokenizer:
    """For tokenizers in which every token stands for certain bytes."""

    __slots__ = ("_decoder", "_texts", "_token_bytes", "_unfinished")

    def __init__(self, token_bytes: Callable[[int], bytes], texts: dict[int, str]) -> None:
        """`texts`: of tokens that are whole characters by themselves; all answers share it, and add to it."""
        self._token_bytes, self._texts = token_bytes, texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = False

    def feed(self, token_id: int) -> str:
        if not self._unfinished and (known := self._texts.get(token_id)) is not None:
            return known
        began_whole = not self._unfinished
        text = self._decoder.decode(self._token_bytes(token_id))
        self._unfinished = bool(self._decoder.getstate()[0])
        if began_whole and not self._unfinished:
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For tokenizers in which a token's text depends on its neighbours: decodes a short window twice.

    At most MAX_PENDING tokens wait for a character to be finished; that many are never needed by valid text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._added()
        if not text or (text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._added() if self._pending else ""
        self._pending = []
        return text

    def _added(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]
