"""Grammars compiled for one model, and each answer's state in its grammar. Workers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.checkpoints import end_tokens
from tandem.containment import on_deep_stack
from tandem.grammar.build import limits
from tandem.grammar.errors import InvalidGrammar
from tandem.vocabulary import Vocabulary, load_tokenizer

MAX_COMPILED = 64
# Twice the stack with which the gateway's helper has compiled the same grammar: a worker survives what the helper did.
STACK_BYTES = 32 * 2**20
# The longest word in bytes, as llguidance panics at more than 1024. Under a grammar longer words are never chosen.
MAX_WORD = 1000
NO_WORD = "the model's vocabulary has no token for what must come next"


class Guide:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_followed = 0

    def follow(self, tokens: Sequence[int]) -> str:
        """Follows the answer's tokens; `tokens` are all so far. Returns what is wrong with them, or ""."""
        new = list(tokens[self._num_followed :])
        if new:
            self._num_followed = len(tokens)
            self._matcher.consume_tokens(new)
        return self._error()

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, as long as there is no choice."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def fill(self, pointer: int, size: int, aheads: Sequence[Sequence[int]]) -> str:
        """Writes the mask, of `size` bytes, of what may follow each of `aheads`, up to the first that is not allowed.

        Each of `aheads` begins with the one before it. Returns what is wrong, or "": then the masks are valid.
        """
        matcher, count = self._matcher, 0
        for i, ahead in enumerate(aheads):
            count += matcher.try_consume_tokens(list(ahead[count:])) if len(ahead) > count else 0
            if count < len(ahead):
                break  # this ahead will not be accepted, so the masks after it do not matter
            matcher.unsafe_compute_mask_ptr(pointer + i * size, size)
        if count and not matcher.is_error():
            matcher.rollback(count)
        return self._error()

    def _error(self) -> str:
        if not self._matcher.is_error():
            return ""
        error = self._matcher.get_error().partition("\n")[0]  # the lines after it are the parser's state
        return NO_WORD if error == "NoExtensionBias" else error


class Grammars:
    """The compiled grammars of one model. Any thread may compile; a Guide belongs to one thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> LLMatcher:
        """Returns a compiled grammar, cached. Raises InvalidGrammar."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._folder, self._vocab_size)
        tokenizer = self._tokenizer
        made = on_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits()), STACK_BYTES)
        if made.is_error():
            raise InvalidGrammar(f"grammar: {' '.join(made.get_error().split())}")
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return made

    def start(self, grammar: str) -> Guide:
        """Returns a guide at an answer's beginning. Raises InvalidGrammar."""
        return Guide(self.compile(grammar).deep_copy())


class _Words:
    """A vocabulary in the form that llguidance reads.

    llguidance's own reader of tokenizer.json does not support Metaspace, ids without a word, and added tokens that are
    text in angle brackets.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_id: int) -> None:
        """`vocab_size`: the number of the model's logits, which may differ from the tokenizer's words."""
        vocabulary = Vocabulary(load_tokenizer(folder))
        words = map(vocabulary.token_bytes, range(vocab_size))
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [word if len(word) <= MAX_WORD else b"" for word in words]
        self.special_token_ids = sorted(i for i in vocabulary.special if i < vocab_size)
        self._spell = vocabulary.spell

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the tokens of a text within an answer; [] if the vocabulary cannot spell it."""
        ids = self._spell(text.decode() if isinstance(text, bytes) else text)
        return ids if all(i < len(self.tokens) and self.tokens[i] for i in ids) else []


def _tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    ends = [token_id for token_id in end_tokens(folder) if token_id < vocab_size]
    if not ends:
        raise InvalidGrammar("grammar: the model has no end-of-text token, so no answer could end with its grammar")
    return LLTokenizer(TokenizerWrapper(_Words(folder, vocab_size, ends[0])), n_vocab=vocab_size, eos_token=ends)
