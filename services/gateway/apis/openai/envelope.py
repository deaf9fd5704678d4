"""The envelope of answers, which chats and completions share.

whole answer    {"id", "object", "created", "model", "choices": [...], "usage"}
stream          the same envelope around each delta; a last one with usage where asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import orjson

from services.gateway.admission import tier_served
from services.gateway.apis.openai.long_lists import is_long, made_in_turns
from services.gateway.apis.openai.schema import GenerationBody
from services.gateway.door import Framing, ParsedBody
from services.gateway.errors import GatewayError
from services.gateway.generation import REASONS, Answer, Choice, Delta
from services.gateway.telemetry import PATHS
from services.gateway.text import Tokenizer
from tandem.v1 import llm_pb2

# A placeholder for the text of an event, which no text contains.
MARK = "\0the text\0"
# Long lists of a choice by name, made in turns beforehand; with `NONE_MADE` each is made where it is used.
Made = Mapping[str, Iterable[Any]]
NONE_MADE: Made = {}


class Format(Protocol):
    """An endpoint's form of a choice. One object serves one request."""

    prefix: str
    whole: str
    chunk: str
    prompt_logprobs_in_choice: bool  # or beside all choices, as vLLM does in a chat

    def delta(self, delta: Delta, made: Made) -> dict[str, Any]: ...

    def choice(self, delta: Delta, made: Made) -> dict[str, Any]: ...

    def logprobs(self, delta: Delta) -> Made:
        """Returns the logprob entries (empty if none). Call before delta() or choice()."""


class Envelope(Framing):
    """The frame around every message of one answer."""

    def __init__(
        self, body: GenerationBody, form: Format, with_prompt_logprobs: bool, found: ParsedBody, answer: Answer,
        created: int,
    ) -> None:  # fmt: skip
        self._form, self._answer = form, answer
        self._n = body.n or 1
        options = body.stream_options
        self.with_usage = bool(options and options.include_usage)
        self.with_token_ids = bool(body.return_token_ids)
        self._continuous = self.with_usage and bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._made: dict[int, Made] = {}  # by the delta's id()
        self._chunked: set[int] = set()  # choices that had an event
        # By choice, once known: the bytes around the text in an event with nothing else.
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        self._repeats = not (self._continuous or self.with_token_ids)
        self._num_ended = 0
        self._with_prompt_logprobs = with_prompt_logprobs
        request = answer.request
        self._frame = {"id": f"{form.prefix}-{request.request_id}", "created": created, "model": request.model.name}
        if body.service_tier is not None:
            self._frame["service_tier"] = tier_served(body.service_tier)
        self._begin = b""  # the beginning of all events, encoded once the revision is known

    async def prepare(self, delta: Delta) -> None:
        if is_long(delta.tokens):
            lists = {**self._form.logprobs(delta), "prompt_logprobs": self._of_prompt(delta)}
            self._made[id(delta)] = {name: await made_in_turns(values) for name, values in lists.items()}

    def chunk(self, delta: Delta) -> bytes:
        """Returns one event of a stream."""
        if delta.is_plain and (around := self._plain.get(delta.choice)):
            return around[0] + orjson.dumps(delta.text) + around[1]
        if self._repeats and delta.is_plain and delta.choice in self._chunked:
            begin, end = self._chunk(replace(delta, text=MARK)).split(orjson.dumps(MARK))
            self._plain[delta.choice] = begin, end
            return begin + orjson.dumps(delta.text) + end
        self._chunked.add(delta.choice)  # a choice's first event has more fields than the others
        return self._chunk(delta)

    def event(self, delta: Delta) -> bytes:
        if (around := self._plain.get(delta.choice)) and delta.is_plain:
            return around[0] + orjson.dumps(delta.text) + around[1] if delta.text else b""
        return super().event(delta)

    def _chunk(self, delta: Delta) -> bytes:
        made = self._made.pop(id(delta), NONE_MADE)
        beside = self._prompt_logprobs(delta, made, in_choice=False) if self._with_prompt_logprobs else {}
        if self.with_usage:
            beside["usage"] = usage(self._answer) if self._continuous else None
        return self._event([self._numbered(delta, self._form.delta(delta, made), made)], beside)

    def shows(self, delta: Delta) -> bool:
        """True if a stream has an event for this delta."""
        return delta.says_something or (self.with_token_ids and bool(delta.tokens.ids))

    def ends_with(self, delta: Delta) -> bool:
        """True if this delta, called in order, is the last one of the answer's last choice."""
        if not delta.finish_reason:
            return False
        self._num_ended += 1
        return self._num_ended == self._answer.request.num_choices

    async def last(self) -> bytes:
        """Returns the event before a stream's end, with usage if asked for."""
        return self._event([], {"usage": usage(self._answer)}) if self.with_usage else b""

    def failure(self, error: GatewayError) -> bytes:
        """Returns the last event of a failed answer."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n"

    def _event(self, choices: list[dict[str, Any]], beside: Mapping[str, Any]) -> bytes:
        end = b"," + orjson.dumps(beside)[1:] if beside else b"}"
        self._begin = self._begin or b"data: " + orjson.dumps(self._framed(self._form.chunk))[:-1] + b',"choices":'
        return self._begin + orjson.dumps(choices) + end + b"\n\n"

    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        kept = self._best(deltas) if self._n < self._answer.request.n else deltas
        made = [self._made.get(id(delta), NONE_MADE) for delta in kept]
        choices = [self._numbered(delta, self._form.choice(delta, m), m) for delta, m in zip(kept, made, strict=True)]
        beside = self._prompt_logprobs(kept[0], made[0], in_choice=False)
        frame = {**self._framed(self._form.whole), "choices": choices}
        return {**frame, **beside, "usage": usage(self._answer)}

    def _framed(self, kind: str) -> dict[str, Any]:
        return {**self._frame, "object": kind, "system_fingerprint": self._answer.revision}

    def _best(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Returns the `n` choices of each prompt with the best mean logprob, best first."""
        best_of, kept = self._answer.request.n, []
        for first in range(0, len(deltas), best_of):
            ranked = sorted(deltas[first : first + best_of], key=_mean_logprob, reverse=True)
            kept += ranked[: self._n]
        for i, delta in enumerate(kept):
            delta.choice = i
        return kept

    def _numbered(self, delta: Delta, said: dict[str, Any], made: Made) -> dict[str, Any]:
        numbered = {"index": delta.choice, **said, "finish_reason": REASONS.get(delta.finish_reason)}
        if delta.finish_reason:
            numbered["stop_reason"] = delta.stop_reason
        if self._with_prompt_logprobs:
            numbered |= self._prompt_logprobs(delta, made, in_choice=True)
        if self.with_token_ids:
            numbered["token_ids"] = delta.tokens.ids
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                numbered["prompt_token_ids"] = list(self._answer.request.prompts[delta.choice // self._n])
        return numbered

    def _prompt_logprobs(self, delta: Delta, made: Made, in_choice: bool) -> dict[str, Any]:
        if not self._with_prompt_logprobs or self._form.prompt_logprobs_in_choice is not in_choice:
            return {}
        if self._answer.request.streamed and not delta.tokens.prompt_logprobs:
            return {}
        return {"prompt_logprobs": made.get("prompt_logprobs") or list(self._of_prompt(delta))}

    def _of_prompt(self, delta: Delta) -> Iterable[dict[str, dict[str, Any]] | None]:
        """Returns prompt logprobs in vLLM's form: for each token, by token id."""
        return chain([None], map(self._by_id, delta.tokens.prompt_logprobs))

    def _by_id(self, one: llm_pb2.TokenLogprobs) -> dict[str, dict[str, Any]]:
        ranked = [(top.token_id, top.logprob, i) for i, top in enumerate(one.top, 1)]
        tokenizer = self._answer.request.model.tokenizer
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
            for token_id, logprob, rank in [*ranked, (one.token_id, one.logprob, one.rank)]
        }


def _mean_logprob(delta: Delta) -> float:
    logprobs = delta.tokens.logprobs
    return sum(one.logprob for one in logprobs) / max(1, len(logprobs))


def usage(answer: Answer) -> dict[str, Any]:
    """Returns OpenAI's usage, and the request's path as `tandem`."""
    used = answer.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens, "audio_tokens": 0},
        "tandem": [_path(choice) for choice in answer.choices],
    }


def _path(choice: Choice) -> dict[str, Any]:
    path = choice.path
    return {
        "path": PATHS.get(path.kind),
        "prefill_worker": path.prefill_worker or None,
        "decode_worker": path.decode_worker,
        "cached_tokens": choice.num_cached_tokens,
        "proposed_tokens": choice.num_proposed_tokens,
        "accepted_tokens": choice.num_accepted_tokens,
        "transfer_bytes": path.transfer_bytes,
        "transport": path.transport or None,
        "fetched_tokens": path.fetched_tokens,
        "fetched_from": path.fetched_from or None,
        "reason": path.reason,
        "migrated": path.migrated,
        **({"model": path.model, "model_reason": path.model_reason or None} if path.model else {}),
    }


# Returns the name of a token in logprobs.
Name = Callable[[int], str]


def namer(tokenizer: Tokenizer, body: GenerationBody) -> Name:
    if body.return_tokens_as_token_ids:
        return "token_id:{}".format
    return lambda token_id: token_text(tokenizer, token_id)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
