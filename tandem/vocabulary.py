"""The bytes of each token of a model, and the tokens of a text: from its tokenizer.json.

Both apply within a text. A tokenizer takes a token that it decodes alone as the beginning of a text, and a text that it
encodes alone as a whole text: there tokenizers like SentencePiece drop a space, or add one.

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
    """Loads a model's tokenizer.

    Raises:
        FileNotFoundError: the folder has no tokenizer.json.
        ValueError: the file is malformed.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    data = read_bytes(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some damage, which is no Exception
        raise ValueError(f"{file}: {error}") from None
    return as_served(tokenizer)


def as_served(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Disables the padding and truncation that training may have left in a tokenizer, and returns it."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# A token that no decoder changes, to decode another token beside it.
NEIGHBOUR = "x"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# Normalizers that change only how words spell a text, not the text.
SPELLING = frozenset({"ByteLevel", "Replace"})
# The options of a pre-tokenizer that keep it from adding a space to a text's beginning.
WITHIN: Mapping[str, Mapping[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False}, "Metaspace": {"prepend_scheme": "never"}
}  # fmt: skip


class Vocabulary:
    """The words of a tokenizer. A model may have more or fewer logits than words, and ids may have gaps.

    `added`: ids of the added tokens, by their text. `special`: ids of the added tokens that are no text.
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
        """Returns the bytes that a token, special or not, adds to a text: perhaps a part of a character. b"" for an
        unused id.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def spell(self, text: str, with_special: bool = False) -> list[int]:
        """Returns the tokens of a text within another text; [] if the words cannot spell all of it.

        Args:
            with_special: the text of a special token becomes that token; else it is spelled like any text.
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
        """Returns a tokenizer with the same model that neither changes a text, nor adds a space before it."""
        if (known := self._spellers.get(with_special)) is not None:
            return known
        speller = tokenizers.Tokenizer(self._tokenizer.model)  # both tokenizers share the model
        kept = [part for part in parts_of(self._tokenizer.normalizer) if part["type"] in SPELLING]
        cuts = [{**part, **WITHIN.get(part["type"], {})} for part in parts_of(self._tokenizer.pre_tokenizer)]
        speller.normalizer = _sequence(normalizers.Sequence([]), "normalizers", kept)
        speller.pre_tokenizer = _sequence(pre_tokenizers.Sequence([]), "pretokenizers", cuts)
        speller.add_tokens([token for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())])
        speller.encode_special_tokens = not with_special
        return self._spellers.setdefault(with_special, speller)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Returns the ids of tokens that are text, by their bytes; of equal tokens the last id."""
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
    """Yields the description of a tokenizer's component; for a sequence the descriptions of its parts."""
    if component is None:
        return
    try:
        left = [json.loads(component.__getstate__())]
    except Exception:  # a component written in Python has no description
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
    """Returns GPT-2's printable characters for bytes: printable Latin-1 bytes are themselves, others follow from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()
