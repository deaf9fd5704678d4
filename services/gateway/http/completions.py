"""POST /v1/completions: text or token ids in, their continuation out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from services.gateway.bodies import Incoming, Prompt, PromptBounds, truncated
from services.gateway.directory import LLM
from services.gateway.errors import InvalidRequest
from services.gateway.generation import Delta
from services.gateway.http import schema
from services.gateway.http.format import CheckTurn, Format, Made, Name, ParsedBody, namer, structure_of
from services.gateway.text import Tokenizer
from services.gateway.untrusted import ChatTemplate
from tandem.v1 import llm_pb2

# As OpenAI has it; an answer in a chat may be as long as the context allows.
DEFAULT_MAX_TOKENS = 16


class CompletionReader(schema.JsonReader[schema.CompletionBody]):
    field = "prompt"

    def parse(self, data: bytes) -> schema.CompletionBody:
        return schema.read(schema.CompletionBody, data)

    def prompts(
        self, body: schema.CompletionBody, bounds: PromptBounds, template: ChatTemplate | None
    ) -> Sequence[Prompt]:
        said = prompts_of(body.prompt)
        bounds.check_choices(len(said), 1)
        return cut(said, body.truncate_prompt_tokens)


COMPLETION = CompletionReader()


async def read_completion(llm: LLM, body: Incoming[schema.CompletionBody], check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found, given = body.body, schema.given_in(body.body, schema.CompletionBody)
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    caller = check_turn(found, given["max_tokens"])
    with_logprobs, n = bool({"logprobs", "logprob_token_ids"} & given.keys()), _choices(found)
    with_prompt_logprobs = "prompt_logprobs" in given
    if found.echo and (with_logprobs or given["max_tokens"] == 0):
        given["prompt_logprobs"] = max(given.get("logprobs", 0), given.get("prompt_logprobs", 0))
    if n > (found.n or 1):
        given.setdefault("logprobs", 0)  # to rank by
    sampling = await llm.sampling(given, {}, structure_of(found), caller)
    said = llm.prompts_in(body)
    llm.bounds.check_choices(len(said), n)
    prompts = [truncated(prompt, found.truncate_prompt_tokens) for prompt in await llm.encode_each(said, "prompt")]
    tokenizer = llm.model.tokenizer
    echoes = [
        Echo(_text(text, tokenizer), list(prompt)) for text, prompt in zip(said, prompts, strict=True) if found.echo
    ]
    return ParsedBody(
        body=found,
        n=n,
        given=given,
        sampling=sampling,
        prompts=prompts,
        param="prompt",
        operation="text_completion",
        format=CompletionFormat(tokenizer, namer(tokenizer, found), echoes, found.n or 1, with_logprobs),
        with_prompt_logprobs=with_prompt_logprobs,
    )


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its answers repeat it."""

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
        """The text before it."""
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
        # Nothing comes before a prompt's first token that could make it likely.
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
        """The likeliest tokens and, as OpenAI has it, the chosen one whether it is among them or not."""
        found = {self._name(top.token_id): top.logprob for top in one.top}
        return found | {self._name(one.token_id): one.logprob}


def _choices(body: schema.CompletionBody) -> int:
    """How many answers are written for each prompt."""
    n, best_of = body.n or 1, body.best_of
    if best_of is None or best_of == n:
        return n
    if best_of < n:
        raise InvalidRequest(f"best_of must not be below n, got {best_of} and {n}", "best_of")
    if body.stream:
        raise InvalidRequest("best_of must be n where stream is true: the best is not known before the end", "best_of")
    return best_of


def cut(prompts: Sequence[Prompt], keep: int | None) -> Sequence[Prompt]:
    """Return token ids as `truncated`; texts as they are, for their tokens are not known yet.

    Raises:
        InvalidRequest
    """
    return [prompt if isinstance(prompt, str) else truncated(prompt, keep) for prompt in prompts]


def prompts_of(prompt: Any, param: str = "prompt") -> Sequence[Prompt]:
    """One prompt or several, each text or token ids.

    Raises:
        InvalidRequest
    """
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest(f"{param} must be a string, a list of token ids, or a list of either", param)
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty", param)
    for i, part in enumerate(prompt):
        if not isinstance(part, str) and not _is_ids(part):
            raise InvalidRequest(f"{param}[{i}] must be a string or a list of token ids", f"{param}[{i}]")
    return prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _text(prompt: str | Sequence[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
