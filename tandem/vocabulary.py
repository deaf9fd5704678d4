"""The bytes of each token of a model, and the tokens of a text: from its tokenizer.json.

Both are meant within a text. A token that is decoded alone begins a text, and a text that is encoded alone is a whole
one: there SentencePiece's kind of tokenizer leaves out a space, and adds one.

    tokenizer.json        <0xE2>     ▁time      Ġtime      ##ing
    decoded alone         \ufffd     "time"     " time"    "##ing"
    within a text         byte E2    " time"    " time"    "ing"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

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


# A token that no decoder changes, as a token's neighbour.
NEIGHBOUR = "x"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# Normalizers that change no text but the words' spelling of it.
SPELLING = frozenset({"ByteLevel", "Replace"})
# Of a pre-tokenizer, where it is not to add a space to a text's beginning.
WITHIN: Mapping[str, Mapping[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False}, "Metaspace": {"prepend_scheme": "never"}
}  # fmt: skip


class Vocabulary:
    """The words of a tokenizer. A model may have more logits than these, or fewer, and there may be holes in their ids.

    `added`: ids of tokens that a text has as a whole, by that text. `special`: of those that are no text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._spellers: dict[bool, tokenizers.Tokenizer] = {}
        decoder = tokenizer.decoder
        kinds = {part["type"] for part in parts_of(decoder)}
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._decode = " ".join if decoder is None else decoder.decode
        self._next = self._decode([NEIGHBOUR, NEIGHBOUR]).removeprefix(NEIGHBOUR)
        added = tokenizer.get_added_tokens_decoder()
        self.added = {token.content: token_id for token_id, token in added.items()}
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what a token, special or not, adds to a text; perhaps a part of a character. b"" of an id without."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def spell(self, text: str, with_special: bool = False) -> list[int]:
        """Returns the tokens of a text within another one; [] where it has no words for it all.

        Args:
            with_special: the name of a special token is that token; else it is text, as all is.
        """
        ids: list[int] = self._speller(with_special).encode(text, add_special_tokens=False).ids
        data = text.encode()
        if (with_special or self.special.isdisjoint(ids)) and b"".join(map(self.token_bytes, ids)) == data:
            return ids
        return self._longest_words(data)

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_fallback and BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if not self._byte_level:
            between = self._decode([NEIGHBOUR, token, NEIGHBOUR])
            return between.removeprefix(NEIGHBOUR).removesuffix(self._next).encode()
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()

    def _speller(self, with_special: bool) -> tokenizers.Tokenizer:
        """Returns a tokenizer with the same model that changes nothing about a text, and adds nothing before it."""
        if (known := self._spellers.get(with_special)) is not None:
            return known
        speller = tokenizers.Tokenizer(self._tokenizer.model)  # which both share
        kept = [part for part in parts_of(self._tokenizer.normalizer) if part["type"] in SPELLING]
        cuts = [{**part, **WITHIN.get(part["type"], {})} for part in parts_of(self._tokenizer.pre_tokenizer)]
        speller.normalizer = _sequence(normalizers.Sequence([]), "normalizers", kept)
        speller.pre_tokenizer = _sequence(pre_tokenizers.Sequence([]), "pretokenizers", cuts)
        speller.add_tokens([token for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())])
        speller.encode_special_tokens = not with_special
        return self._spellers.setdefault(with_special, speller)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Ids of tokens that are text, by their bytes: the last one of those that are the same."""
        words = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return {self.token_bytes(i): i for i in sorted(words) if i not in self.special}

    def _longest_words(self, data: bytes) -> list[int]:
        ids, found, at = self._ids, list[int](), 0
        longest = max(map(len, ids), default=0)
        while at < len(data):
            ends = range(min(len(data), at + longest), at, -1)
            end = next((end for end in ends if data[at:end] in ids), 0)
            if not end:
                return []
            found.append(ids[data[at:end]])
            at = end
        return found


def parts_of(component: Any) -> Iterator[dict[str, Any]]:
    """Yields the descriptions of a tokenizer's component and, in place of a sequence, of what is in it."""
    if component is None:
        return
    try:
        left = [json.loads(component.__getstate__())]
    except Exception:  # it is written in Python
        left = [{"type": ""}]
    while left:
        part = left.pop()
        inner = [part[name] for name in ("normalizers", "pretokenizers", "processors", "decoders") if name in part]
        if part["type"] == "Sequence" and inner:
            left += reversed(inner[0])
        else:
            yield part


def _sequence(empty: Any, name: str, parts: Sequence[Mapping[str, Any]]) -> Any:
    empty.__setstate__(json.dumps({"type": "Sequence", name: parts}).encode())
    return empty


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()
