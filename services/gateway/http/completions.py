"""POST /v1/completions: text or token ids in, their continuation out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.generation import Delta, read_sampling, truncated
from services.gateway.http import schema
from services.gateway.http.format import Format, ParsedBody, structure_of, token_text
from services.gateway.llm import LLM
from services.gateway.text import Tokenizer
from tandem.v1 import llm_pb2

# As OpenAI has it; an answer in a chat may be as long as the context allows.
DEFAULT_MAX_TOKENS = 16


async def read_completion(llm: LLM, body: bytes) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found, given = schema.read(schema.CompletionBody, body)
    llm.served(found.model)
    if found.echo and "logprobs" in given:
        raise InvalidRequest("echo: logprobs of the prompt are not supported by this server", "echo")
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    with_logprobs, n = "logprobs" in given, _choices(found)
    if n > (found.n or 1):
        given.setdefault("logprobs", 0)  # to rank by
    sampling = await read_sampling(given, llm.model, structure=structure_of(found))
    said = _prompts(found.prompt)
    llm.check_choices(len(said), n)
    read = [await llm.encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in said]
    prompts = [truncated(prompt, found.truncate_prompt_tokens) for prompt in read]
    tokenizer = llm.model.tokenizer
    echoes = [_text(prompt, tokenizer) for prompt in said] if found.echo else []
    return ParsedBody(
        body=found,
        n=n,
        given=given,
        sampling=sampling,
        prompts=prompts,
        param="prompt",
        operation="text_completion",
        format=CompletionFormat(tokenizer, echoes, found.n or 1, with_logprobs),
    )


class CompletionFormat(Format):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: Sequence[str], n: int, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._tokenizer = tokenizer
        self._echoes = {i: echoes[i // n] for i in range(len(echoes) * n)}

    def delta(self, delta: Delta) -> dict[str, Any]:
        return self.choice(delta)

    def choice(self, delta: Delta) -> dict[str, Any]:
        text = self._echoes.pop(delta.choice, "") + delta.text
        return {"text": text, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        logprobs = delta.tokens.logprobs
        if not logprobs or not self._with_logprobs:
            return None
        return {
            "tokens": [token_text(self._tokenizer, one.token_id) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": delta.offsets,
        }

    def _top(self, one: llm_pb2.TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and, as OpenAI has it, the chosen one whether it is among them or not."""
        found = {token_text(self._tokenizer, top.token_id): top.logprob for top in one.top}
        return found | {token_text(self._tokenizer, one.token_id): one.logprob}


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


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a string, a list of token ids, or a list of either", "prompt")
    if not prompt:
        raise InvalidRequest("prompt must not be empty", "prompt")
    for i, part in enumerate(prompt):
        if not isinstance(part, str) and not _is_ids(part):
            raise InvalidRequest(f"prompt[{i}] must be a string or a list of token ids", f"prompt[{i}]")
    return prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _text(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
