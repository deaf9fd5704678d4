"""A Hugging Face tokenizer.json: text to ids, ids to text, and the text of one token."""

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

# Longer texts are tokenized in batches on a thread, while the event loop serves other requests.
LONG_TEXT = 4096
T = TypeVar("T")
MOST_TOKENS = 2**20
# Bound of a tokenizer with unknown patterns, which may never end. No prompt takes nearly as long.
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
            most: tokens of a text; copying more from the library would take too long.
            parts: the parts that it was assembled from, if any.
        """
        self._tokenizer, self._most = tokenizer, most
        words = {} if parts else tokenizer.get_vocab(with_added_tokens=True)
        # The most characters of a token: a text has at least its length divided by this in tokens.
        self.longest_token = parts.longest_token if parts else max(map(len, words))
        # Bound of ids. Some ids below it may have no token.
        self.vocab_size = parts.vocab_size if parts else max(words.values()) + 1
        self._vocabulary = Vocabulary(tokenizer)
        self.token_bytes = self._vocabulary.token_bytes
        self._is_quick = has_known_patterns(tokenizer)
        self._speller, self._marks = WorkThreads("spell", 1), dict[str, tuple[int, ...]]()
        self._texts: dict[frozenset[int], dict[int, str]] = {}  # by the set of hidden tokens
        # Not a bound method, whose reference cycle only the garbage collector would free.
        self._encode = partial(_encoded, tokenizer, most)
        self._with_special, self._without_special = (
            Batches(partial(self._encode, special)) for special in (True, False)
        )
        dividers = dividers_of(tokenizer)
        self._prefixes = PrefixCache(dividers) if dividers else None

    @classmethod
    def load(cls, folder: Path, most: int = MOST_TOKENS, parts: TokenizerParts | None = None) -> Tokenizer:
        """Returns a folder's tokenizer. `parts`: its tokenizer.json in parts.

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
        """Returns the ids of a rendered conversation, whose template adds special tokens itself.

        Args:
            salt: beginnings of texts are cached for each salt.
        """
        if len(text) < LONG_TEXT or self._prefixes is None:
            return await self.encode(text, add_special_tokens=False)
        rest = self._prefixes.find(salt, text)
        ids = await self._encode_rest(rest, add_special_tokens=False)
        self._prefixes.keep(rest)
        return ids

    async def encode_each(self, texts: Sequence[str]) -> list[CheckedIds]:
        """Returns the ids of texts, with special tokens."""
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
        """Returns the id of a token by its name; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def mark(self, text: str) -> str | int:
        """Returns the id of a mark that is one special token, which nothing else spells; else its text."""
        found = self._vocabulary.added.get(text)
        return found if found in self._vocabulary.special else text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, shown: Collection[str] = ()) -> Detokenizer:
        """Returns the detokenizer of one answer. Special tokens in `shown` are always text."""
        hidden = self._vocabulary.special if skip_special_tokens else frozenset()
        if hidden and shown:
            hidden = hidden.difference(map(self._vocabulary.added.get, shown))
        texts = self._texts.setdefault(hidden, {})
        return Detokenizer(lambda token_id: b"" if token_id in hidden else self.token_bytes(token_id), texts)

    def pieces(self, token_ids: Iterable[int]) -> Iterator[str]:
        """Yields the text that each token adds to a whole text. The library may drop a space at the beginning."""
        detokenizer, begun = self.detokenizer(), False
        for token_id in token_ids:
            piece = detokenizer.feed(token_id)
            if piece and not begun:
                begun = True
                if piece.encode() == self.token_bytes(token_id):
                    piece = self.decode([token_id])
            yield piece

    async def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of each word, as it is and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return await self._in_time(self._speller.run(self._spell, texts))

    def _spell(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of texts. Runs on a thread, as the library may be slow."""
        try:
            return [tuple(self._vocabulary.spell(text, with_special=True)) for text in texts]
        except BaseException as error:  # a panic of the library
            raise UnreadText(f"the model's tokenizer fails: {error}") from None

    def _encode_short(self, text: str, add_special_tokens: bool) -> CheckedIds:
        # A batch of one: encode() would hold the interpreter's lock, and so block the event loop.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > self._most:
            raise TooManyTokens(len(encoding))
        return CheckedIds("I", encoding.ids)

    async def _encode_rest(self, text: Untokenized, add_special_tokens: bool) -> CheckedIds:
        if len(text) < LONG_TEXT and self._is_quick:
            return result(self._encode(add_special_tokens, [text])[0])
        return await self._encode_beside(text, add_special_tokens)

    async def _encode_beside(self, text: Untokenized, add_special_tokens: bool) -> CheckedIds:
        """Returns the ids of a text, encoded on a thread."""
        return await self._in_time((self._with_special if add_special_tokens else self._without_special).encode(text))

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Returns the result of work on a thread. Raises UnreadText if it exceeds its bound."""
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
    """Returns the outcomes of texts. `most`: tokens of a text to copy from the library."""
    pieces = [piece for text in texts for piece in text.pieces]
    found = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens))
    return [_joined(text, list(islice(found, len(text.pieces))), most) for text in texts]


def _joined(text: Untokenized, encodings: Sequence[tokenizers.Encoding], most: int) -> Outcome:
    count = text.num_tokens([len(encoding) for encoding in encodings])
    if count > most:
        return TooManyTokens(count)
    return text.join([CheckedIds("I", encoding.ids) for encoding in encodings])
