"""A Hugging Face tokenizer.json: text to ids, ids to text, and what one token says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import tokenizers

from services.gateway.text.batches import Batches, Outcome, result
from services.gateway.text.checked_ids import CheckedIds
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.dividers import dividers_of
from services.gateway.text.prefixes import PrefixCache, Untokenized
from services.gateway.untrusted import TokenizerParts
from tandem.vocabulary import Vocabulary, as_served, load_tokenizer

# Longer texts are tokenized in batches on a thread: the event loop serves other requests meanwhile.
LONG_TEXT = 4096
MOST_TOKENS = 2**20


class TooManyTokens(ValueError):
    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens are more than are read of one text")


class Tokenizer:
    def __init__(
        self, tokenizer: tokenizers.Tokenizer, most: int = MOST_TOKENS, parts: TokenizerParts | None = None
    ) -> None:
        """
        Args:
            most: of a text. To read more of them out of the library would take too long.
            parts: what it was assembled of, if it was.
        """
        self._tokenizer, self._most = tokenizer, most
        words = {} if parts else tokenizer.get_vocab(with_added_tokens=True)
        # A text has at least its length divided by this in tokens.
        self.longest_token = parts.longest_token if parts else max(map(len, words))
        # All ids are below it. There may be fewer tokens than that, for not every id must have one.
        self.vocab_size = parts.vocab_size if parts else max(words.values()) + 1
        self._vocabulary = Vocabulary(tokenizer)
        self.token_bytes = self._vocabulary.token_bytes
        self._texts: dict[frozenset[int], dict[int, str]] = {}  # by the tokens that are hidden
        self._with_special, self._without_special = (
            Batches(partial(self._encode, special)) for special in (True, False)
        )
        dividers = dividers_of(tokenizer)
        self._prefixes = PrefixCache(dividers) if dividers else None

    @classmethod
    def load(cls, folder: Path, most: int = MOST_TOKENS, parts: TokenizerParts | None = None) -> Tokenizer:
        """`parts`: its tokenizer.json, taken apart.

        Raises:
            FileNotFoundError: the folder has no tokenizer.json.
            ValueError: it is malformed.
        """
        if parts is not None:
            return cls(as_served(parts.assemble()), most, parts)
        return cls(load_tokenizer(folder), most)

    async def encode(self, text: str, add_special_tokens: bool) -> CheckedIds:
        if len(text) < LONG_TEXT:
            return self._encode_short(text, add_special_tokens)
        return await self._encode_rest(Untokenized([text]), add_special_tokens)

    async def encode_chat(self, text: str, salt: str) -> CheckedIds:
        """Encodes a rendered conversation, whose template adds its special tokens itself.

        Args:
            salt: what texts of this salt have begun with is cached.
        """
        if len(text) < LONG_TEXT or self._prefixes is None:
            return await self.encode(text, add_special_tokens=False)
        rest = self._prefixes.find(salt, text)
        ids = await self._encode_rest(rest, add_special_tokens=False)
        self._prefixes.keep(rest)
        return ids

    async def encode_each(self, texts: Sequence[str]) -> list[CheckedIds]:
        """With special tokens."""
        if sum(map(len, texts)) < LONG_TEXT:
            return [self._encode_short(text, True) for text in texts]
        return await asyncio.gather(*(self._with_special.encode(Untokenized([text])) for text in texts))

    def token_ids(self, mark: str) -> tuple[int, ...]:
        """Returns the tokens, special ones among them, of a few characters within a text."""
        return tuple(self._vocabulary.spell(mark, with_special=True))

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its name; None where there is none."""
        return self._tokenizer.token_to_id(token)

    def mark(self, text: str) -> str | int:
        """The special token that it is, if it is one: no other token says so then."""
        found = self._vocabulary.added.get(text)
        return found if found in self._vocabulary.special else text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, shown: Collection[str] = ()) -> Detokenizer:
        """A fresh one, for one answer. Special tokens in `shown` are text, whatever becomes of the others."""
        hidden = self._vocabulary.special if skip_special_tokens else frozenset()
        if hidden and shown:
            hidden = hidden.difference(map(self._vocabulary.added.get, shown))
        texts = self._texts.setdefault(hidden, {})
        return Detokenizer(lambda token_id: b"" if token_id in hidden else self.token_bytes(token_id), texts)

    def pieces(self, token_ids: Iterable[int]) -> Iterator[str]:
        """Yields what each token of a whole text adds to it. The library may leave a space out of its beginning."""
        detokenizer, begun = self.detokenizer(), False
        for token_id in token_ids:
            piece = detokenizer.feed(token_id)
            if piece and not begun:
                begun = True
                if piece.encode() == self.token_bytes(token_id):
                    piece = self.decode([token_id])
            yield piece

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Returns the tokens of a word within a text, as it is and behind a space."""
        return [self.token_ids(text) for text in (word, f" {word.lstrip()}")]

    def _encode_short(self, text: str, add_special_tokens: bool) -> CheckedIds:
        # As a batch: encode() would hold the interpreter's lock, and so the event loop, for as long as it takes.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > self._most:
            raise TooManyTokens(len(encoding))
        return CheckedIds("I", encoding.ids)

    async def _encode_rest(self, text: Untokenized, add_special_tokens: bool) -> CheckedIds:
        if len(text) < LONG_TEXT:
            return result(self._encode(add_special_tokens, [text])[0])
        return await (self._with_special if add_special_tokens else self._without_special).encode(text)

    def _encode(self, add_special_tokens: bool, texts: Sequence[Untokenized]) -> list[Outcome]:
        pieces = [piece for text in texts for piece in text.pieces]
        found = iter(self._tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens))
        return [self._joined(text, list(islice(found, len(text.pieces)))) for text in texts]

    def _joined(self, text: Untokenized, encodings: Sequence[tokenizers.Encoding]) -> Outcome:
        count = text.num_tokens([len(encoding) for encoding in encodings])
        if count > self._most:
            return TooManyTokens(count)
        return text.join([CheckedIds("I", encoding.ids) for encoding in encodings])
