"""A Hugging Face tokenizer.json: text to ids, ids to text, and what one token says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders

from services.gateway.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

# Longer texts are tokenized on a thread: the event loop serves other requests meanwhile.
LONG_TEXT = 4096


class Tokenizer:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """
        Raises:
            FileNotFoundError: the folder has no tokenizer.json.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        return cls(tokenizers.Tokenizer.from_file(str(file)))

    @cached_property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """In characters. A text has at least its length divided by this in tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh one, for one answer."""
        if self._byte_level:
            return ByteDetokenizer(self._text_bytes if skip_special_tokens else self.token_bytes)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    async def spellings(self, word: str) -> list[list[int]]:
        """The tokens of a word at the beginning of a text and within one."""
        return [await self.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token says by itself, special or not; perhaps a part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch: encode() would hold the interpreter's lock, and so the event loop, for as long as it takes.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self._byte_level:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()
