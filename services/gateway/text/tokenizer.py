"""A Hugging Face tokenizer.json: text to ids, ids to text, and what one token says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import tokenizers

from services.gateway.text.batches import Batches, Outcome, UnreadText, result
from services.gateway.text.checked_ids import CheckedIds
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.dividers import dividers_of
from services.gateway.text.patterns import has_known_patterns
from services.gateway.text.prefixes import PrefixCache, Untokenized
from services.gateway.untrusted import TokenizerParts
from tandem.process import WorkThreads
from tandem.vocabulary import Vocabulary, as_served, load_tokenizer

# Longer texts are tokenized in batches on a thread: the event loop serves other requests meanwhile.
LONG_TEXT = 4096
T = TypeVar("T")
MOST_TOKENS = 2**20
# A tokenizer whose patterns are not known may read for ever. No prompt of a model takes nearly as long.
MOST_S = 30.0


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
        self._is_quick = has_known_patterns(tokenizer)
        self._speller, self._marks = WorkThreads("spell", 1), dict[str, tuple[int, ...]]()
        self._texts: dict[frozenset[int], dict[int, str]] = {}  # by the tokens that are hidden
        # Not a method of this object: with what refers to it in turn it would only be garbage that is looked for.
        self._encode = partial(_encoded, tokenizer, most)
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
        if len(text) < LONG_TEXT and self._is_quick:
            return self._encode_short(text, add_special_tokens)
        return await self._encode_beside(Untokenized([text]), add_special_tokens)

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
        if sum(map(len, texts)) < LONG_TEXT and self._is_quick:
            return [self._encode_short(text, True) for text in texts]
        return await asyncio.gather(*(self._encode_beside(Untokenized([text]), True) for text in texts))

    def token_ids(self, mark: str) -> tuple[int, ...]:
        """Returns the tokens, special ones among them, of a mark of the model's format within a text."""
        known = self._marks.get(mark)
        if known is None:
            known = self._marks[mark] = tuple(self._vocabulary.spell(mark, with_special=True))
        return known

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

    async def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of each word within a text, as it is and behind a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return await self._in_time(self._speller.run(self._spell, texts))

    def _spell(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Runs on a thread: the first word that is not spelled as the model would looks at all others."""
        try:
            return [tuple(self._vocabulary.spell(text, with_special=True)) for text in texts]
        except BaseException as error:  # where the library panics
            raise UnreadText(f"the model's tokenizer fails: {error}") from None

    def _encode_short(self, text: str, add_special_tokens: bool) -> CheckedIds:
        # As a batch: encode() would hold the interpreter's lock, and so the event loop, for as long as it takes.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > self._most:
            raise TooManyTokens(len(encoding))
        return CheckedIds("I", encoding.ids)

    async def _encode_rest(self, text: Untokenized, add_special_tokens: bool) -> CheckedIds:
        if len(text) < LONG_TEXT and self._is_quick:
            return result(self._encode(add_special_tokens, [text])[0])
        return await self._encode_beside(text, add_special_tokens)

    async def _encode_beside(self, text: Untokenized, add_special_tokens: bool) -> CheckedIds:
        """Encodes a text on a thread."""
        return await self._in_time((self._with_special if add_special_tokens else self._without_special).encode(text))

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Awaits work of a thread. Raises UnreadText where it takes longer than it may."""
        if self._is_quick:
            return await work
        try:
            async with asyncio.timeout(MOST_S):
                return await work
        except TimeoutError:
            raise UnreadText(f"the model's tokenizer has not read it in {MOST_S:.0f} s") from None


def _encoded(
    tokenizer: tokenizers.Tokenizer, most: int, add_special_tokens: bool, texts: Sequence[Untokenized]
) -> list[Outcome]:
    """`most`: tokens of a text that are read out of the library."""
    pieces = [piece for text in texts for piece in text.pieces]
    found = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens))
    return [_joined(text, list(islice(found, len(text.pieces))), most) for text in texts]


def _joined(text: Untokenized, encodings: Sequence[tokenizers.Encoding], most: int) -> Outcome:
    count = text.num_tokens([len(encoding) for encoding in encodings])
    if count > most:
        return TooManyTokens(count)
    return text.join([CheckedIds("I", encoding.ids) for encoding in encodings])
