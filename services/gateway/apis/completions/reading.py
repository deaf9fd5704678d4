"""POST /v1/completions: text or token ids in, their continuation out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from services.gateway.apis.completions.format import CompletionFormat, Echo
from services.gateway.apis.openai import schema
from services.gateway.apis.openai.envelope import Envelope, namer
from services.gateway.apis.openai.structure import structure_of
from services.gateway.bodies import Incoming, Prompt, PromptBounds, truncated
from services.gateway.directory import LLM
from services.gateway.door import CheckTurn, ParsedBody
from services.gateway.errors import InvalidRequest
from services.gateway.generation import read_response_format
from services.gateway.text import Tokenizer
from services.gateway.untrusted import ChatTemplate

# OpenAI's default; a chat's answer may fill the context.
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
    """Raises GatewayError."""
    found, given = body.body, schema.given_in(body.body, schema.CompletionBody)
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    caller = check_turn(terms := schema.terms_of(found), given["max_tokens"])
    with_logprobs, n = bool({"logprobs", "logprob_token_ids"} & given.keys()), _choices(found)
    with_prompt_logprobs = "prompt_logprobs" in given
    if found.echo and (with_logprobs or given["max_tokens"] == 0):
        given["prompt_logprobs"] = max(given.get("logprobs", 0), given.get("prompt_logprobs", 0))
    if n > (found.n or 1):
        given.setdefault("logprobs", 0)  # to rank choices by
    structure = structure_of(found, read_response_format(found.response_format))
    sampling = await llm.sampling(given, {}, structure, caller)
    said = llm.prompts_in(body)
    llm.bounds.check_choices(len(said), n)
    prompts = [truncated(prompt, found.truncate_prompt_tokens) for prompt in await llm.encode_each(said, "prompt")]
    tokenizer = llm.model.tokenizer
    echoes = [
        Echo(_text(text, tokenizer), list(prompt)) for text, prompt in zip(said, prompts, strict=True) if found.echo
    ]
    form = CompletionFormat(tokenizer, namer(tokenizer, found), echoes, found.n or 1, with_logprobs)
    return ParsedBody(
        terms=terms,
        n=n,
        given=given,
        sampling=sampling,
        prompts=prompts,
        param="prompt",
        operation="text_completion",
        frame=partial(Envelope, found, form, with_prompt_logprobs),
    )


def _choices(body: schema.CompletionBody) -> int:
    """Returns the number of answers to generate for each prompt."""
    n, best_of = body.n or 1, body.best_of
    if best_of is None or best_of == n:
        return n
    if best_of < n:
        raise InvalidRequest(f"best_of must not be below n, got {best_of} and {n}", "best_of")
    if body.stream:
        raise InvalidRequest("best_of must be n where stream is true: the best is not known before the end", "best_of")
    return best_of


def cut(prompts: Sequence[Prompt], keep: int | None) -> Sequence[Prompt]:
    """Returns token ids truncated; texts unchanged, as their tokens are not known yet. Raises InvalidRequest."""
    return [prompt if isinstance(prompt, str) else truncated(prompt, keep) for prompt in prompts]


def prompts_of(prompt: Any, param: str = "prompt") -> Sequence[Prompt]:
    """Returns the prompts of a field that has one or several, each text or token ids. Raises InvalidRequest."""
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
