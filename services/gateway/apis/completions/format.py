"""The form of a completion: its whole choices, and its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from services.gateway.apis.openai.envelope import Format, Made, Name
from services.gateway.generation import Delta
from services.gateway.text import Tokenizer
from tandem.v1 import llm_pb2


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers repeat."""

    text: str
    token_ids: list[int]


class CompletionFormat(Format):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"
    prompt_logprobs_in_choice = True

    def __init__(self, tokenizer: Tokenizer, name: Name, echoes: Sequence[Echo], n: int, with_logprobs: bool) -> None:
        """`n`: choices of each prompt."""
        self._with_logprobs = with_logprobs
        self._tokenizer, self._name = tokenizer, name
        self._echoes, self._n = echoes, n
        self._begun: set[int] = set()

    def delta(self, delta: Delta, made: Made) -> dict[str, Any]:
        lists = self.logprobs(delta)
        logprobs = {name: made.get(name) or list(values) for name, values in lists.items()} or None
        if (echo := self._echo(delta)) is None:
            return {"text": delta.text, "logprobs": logprobs}
        self._begun.add(delta.choice)
        return {"text": echo.text + delta.text, "logprobs": logprobs}

    def choice(self, delta: Delta, made: Made) -> dict[str, Any]:
        return self.delta(delta, made)

    def _echo(self, delta: Delta) -> Echo | None:
        """Returns the prompt to put before a choice's first delta."""
        if not self._echoes or delta.choice in self._begun:
            return None
        return self._echoes[delta.choice // self._n]

    def logprobs(self, delta: Delta) -> Made:
        echo, tokens = self._echo(delta), delta.tokens
        if not self._with_logprobs or not (tokens.logprobs or echo):
            return {}
        begin = len(self._echoes[delta.choice // self._n].text) if self._echoes else 0
        offsets: Iterable[int] = (begin + offset for offset in delta.offsets[: len(tokens.logprobs)])
        if echo is None:
            return self._lists(lambda: tokens.logprobs, offsets)
        offsets = chain(self._offsets(echo), offsets)
        lists = self._lists(lambda: chain(tokens.prompt_logprobs, tokens.logprobs), offsets)
        # A prompt's first token has no logprob, as nothing precedes it.
        first = {"tokens": self._name(echo.token_ids[0]), "token_logprobs": None, "top_logprobs": None}
        return {name: chain([first[name]], values) if name in first else values for name, values in lists.items()}

    def _lists(
        self, logprobs: Callable[[], Iterable[llm_pb2.TokenLogprobs]], offsets: Iterable[int]
    ) -> dict[str, Iterable[Any]]:
        return {
            "tokens": (self._name(one.token_id) for one in logprobs()),
            "token_logprobs": (one.logprob for one in logprobs()),
            "top_logprobs": map(self._top, logprobs()),
            "text_offset": offsets,
        }

    def _offsets(self, echo: Echo) -> Iterator[int]:
        length = 0
        for piece in self._tokenizer.pieces(echo.token_ids):
            yield length
            length += len(piece)

    def _top(self, one: llm_pb2.TokenLogprobs) -> dict[str, float]:
        """Returns the likeliest tokens and, as OpenAI does, the chosen one in any case."""
        found = {self._name(top.token_id): top.logprob for top in one.top}
        return found | {self._name(one.token_id): one.logprob}
