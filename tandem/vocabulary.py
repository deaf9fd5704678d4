"""The bytes of each token of a model: from its tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders

from tandem.checkpoints import read_bytes


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """
    Raises:
        FileNotFoundError: the folder has no tokenizer.json.
        ValueError: it is malformed.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    data = read_bytes(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # some damage makes the library panic, which is no Exception
        raise ValueError(f"{file}: {error}") from None
    return as_served(tokenizer)


def as_served(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Without what is left from training: a prompt is neither as long as others that come with it, nor cut."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class Vocabulary:
    """`special`: ids of tokens that are no text. `byte_level`: every token stands for certain bytes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token by itself, special or not; perhaps a part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self.byte_level:
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
