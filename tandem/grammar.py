"""Answers that follow a grammar: a JSON schema, a regular expression, a choice, a grammar of its own.

    gateway   schema -> grammar, checked      a few milliseconds, before anything is reserved
    worker    grammar -> compiled, once       kept by its text, so the next request only copies it
              tokens of the answer -> state   followed as they come; after a preemption or elsewhere, from the first on
              state -> mask                   one bit for each token that may come next

The mask depends on nothing but the grammar and the tokens before. llguidance does the work.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper, grammar_from

from tandem.model_files import end_tokens
from tandem.vocabulary import Vocabulary, load_tokenizer

MAX_COMPILED = 64
# Between the parts of JSON: a space, or a new line and its indentation.
WHITESPACE = r" ?|\n[ \t]{0,20}"


class InvalidGrammar(ValueError):
    """No answer can be held to this; the text says why, and where."""


def of_json_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE})


def of_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def of_choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def of_grammar(text: str) -> str:
    """Lark, or EBNF as llama.cpp writes it.

    Raises:
        InvalidGrammar
    """
    try:
        return grammar_from("grammar", text)
    except (ValueError, AssertionError) as error:
        raise InvalidGrammar(str(error)) from None


def of_tags(tags: Sequence[Mapping[str, Any]], triggers: Sequence[str]) -> str:
    """Free text in which a trigger begins one of `tags`: its `begin`, JSON of its `schema`, its `end`.

    Raises:
        InvalidGrammar
    """
    made = []
    for tag in tags:
        trigger = next((one for one in triggers if tag["begin"].startswith(one)), None)
        if not trigger:
            raise InvalidGrammar(f"no trigger begins {tag['begin']!r}")
        made.append(StructTag(trigger=trigger, begin=tag["begin"], grammar=tag["schema"], end=tag["end"]))
    if not made:
        raise InvalidGrammar("there are no structures")
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(made, assume_special=False))


def of_calls(schemas: Mapping[str, Mapping[str, Any]], most: int | None) -> str:
    """A JSON list of one or more {"name": ..., "arguments": ...}: each of them a name and its schema."""
    rules = ['start: "[" call (", " call)* "]"' if most is None else 'start: "[" call "]"']
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    for i, (name, schema) in enumerate(schemas.items()):
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        spaced = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules += [f'call_{i}: {begin} arguments_{i} "}}"', f"arguments_{i}: %json {json.dumps(spaced)}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def behind_thoughts(grammar: str, end: str | int) -> str:
    """The same, behind any text that ends with `end`, a text or a special token."""
    answer = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    answer["grammars"][0]["name"] = "answer"
    if isinstance(end, int):
        thoughts = f"start: thoughts <[{end}]> /\\s*/ @answer\nthoughts: /(.|\\n)*/\n"
    else:
        thoughts = f"start: thoughts /\\s*/ @answer\nthoughts[suffix={json.dumps(end)}]: /(.|\\n)*/\n"
    return json.dumps({**answer, "grammars": [{"lark_grammar": thoughts}, *answer["grammars"]]})


def check(grammar: str) -> None:
    """
    Raises:
        InvalidGrammar
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    if failed:
        raise InvalidGrammar(" ".join(messages[0].split()))


def _limits() -> LLParserLimits:
    """What a grammar may cost: its own size, and what each step of its parser does. A fifth of llguidance's own."""
    return LLParserLimits(
        max_grammar_size=100_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=20_000,
        max_lexer_states=50_000, max_items_in_row=1_000,
    )  # fmt: skip


class Guide:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_followed = 0

    def follow(self, tokens: Sequence[int]) -> str:
        """All tokens of the answer so far; returns what is wrong with them, if anything."""
        new = list(tokens[self._num_followed :])
        if new:
            self._num_followed = len(tokens)
            self._matcher.consume_tokens(new)
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def fill(self, pointer: int, size: int, aheads: Sequence[Sequence[int]]) -> None:
        """Write the masks of what may follow each of `aheads`, of `size` bytes, up to one that is not allowed itself.

        Each begins with the one before it.
        """
        matcher, count = self._matcher, 0
        for i, ahead in enumerate(aheads):
            count += matcher.try_consume_tokens(list(ahead[count:])) if len(ahead) > count else 0
            if count < len(ahead):
                break  # it will not be drawn, so what would follow it does not matter
            matcher.unsafe_compute_mask_ptr(pointer + i * size, size)
        if count:
            matcher.rollback(count)


class Grammars:
    """Of one model. Any thread may compile; each Guide belongs to one."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> LLMatcher:
        """
        Raises:
            InvalidGrammar
        """
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._folder, self._vocab_size)
        made = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if made.is_error():
            raise InvalidGrammar(f"grammar: {' '.join(made.get_error().split())}")
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return made

    def start(self, grammar: str) -> Guide:
        """At the first token.

        Raises:
            InvalidGrammar
        """
        return Guide(self.compile(grammar).deep_copy())


class _Words:
    """A vocabulary as llguidance reads it."""

    def __init__(self, folder: Path, eos_token_id: int) -> None:
        tokenizer = load_tokenizer(folder)
        vocabulary = Vocabulary(tokenizer)
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [vocabulary.token_bytes(i) for i in range(vocabulary.size)]
        self.special_token_ids = sorted(vocabulary.special)
        self._encode: Callable[..., Any] = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        ids: list[int] = self._encode(text.decode() if isinstance(text, bytes) else text, add_special_tokens=False).ids
        return ids


def _tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    ends = end_tokens(folder)
    if not ends:
        raise InvalidGrammar("grammar: the model has no end-of-text token, so no answer could end with its grammar")
    return LLTokenizer(TokenizerWrapper(_Words(folder, ends[0])), n_vocab=vocab_size, eos_token=list(ends))
