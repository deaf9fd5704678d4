"""POST /v1/embeddings: texts or token ids in, a vector of each out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from struct import pack
from typing import Any

from services.gateway.apis.completions import cut, prompts_of
from services.gateway.apis.openai import schema
from services.gateway.apis.openai.envelope import usage
from services.gateway.bodies import Incoming, Prompt, PromptBounds, truncated
from services.gateway.directory import LLM
from services.gateway.door import CheckTurn, Framing, ParsedBody, Terms, Unstreamed
from services.gateway.errors import InvalidRequest
from services.gateway.generation import Answer, Delta
from services.gateway.untrusted import ChatTemplate

ENCODINGS = ("float", "base64")
MOST_DIMENSIONS = 2**16
MOST_TEXTS = 2048  # of one request, as OpenAI has it


class EmbeddingReader(schema.JsonReader[schema.EmbeddingBody]):
    field = "input"

    def parse(self, data: bytes) -> schema.EmbeddingBody:
        found = schema.validated(schema.EmbeddingBody, data)
        _check(found)
        return found

    def prompts(
        self, body: schema.EmbeddingBody, bounds: PromptBounds, template: ChatTemplate | None
    ) -> Sequence[Prompt]:
        said = prompts_of(body.input, "input")
        check_count(len(said), "input")
        return cut(said, body.truncate_prompt_tokens)


EMBEDDING = EmbeddingReader()


async def read_embeddings(llm: LLM, body: Incoming[schema.EmbeddingBody], check_turn: CheckTurn) -> ParsedBody:
    """Raises GatewayError."""
    found, terms = body.body, schema.terms_of(body.body)
    asked = Pooled(terms, check_turn(terms, 0), found.truncate_prompt_tokens, found.dimensions or 0)
    return await asked.parsed(llm, llm.prompts_in(body), "input", partial(EmbeddingFrame, found))


@dataclass(frozen=True, slots=True)
class Pooled:
    """A request for vectors of texts."""

    terms: Terms
    tenant: str
    keep_last: int | None
    dimensions: int = 0

    async def parsed(
        self, llm: LLM, said: Sequence[Prompt], param: str, frame: Callable[[ParsedBody, Answer, int], Framing]
    ) -> ParsedBody:
        """Returns the request for a vector of each of `said`. Raises GatewayError."""
        prompts = [truncated(prompt, self.keep_last) for prompt in await llm.encode_each(said, param)]
        given = {"max_tokens": 1}  # not shown to clients
        return ParsedBody(
            terms=self.terms,
            given=given,
            sampling=await llm.sampling(given, {}, None, self.tenant),
            prompts=prompts,
            param=param,
            operation="embeddings",
            frame=frame,
            dimensions=self.dimensions,
        )


def _check(body: schema.EmbeddingBody) -> None:
    """Raises InvalidRequest."""
    if body.encoding_format not in (None, *ENCODINGS):
        said = f"encoding_format must be {' or '.join(ENCODINGS)}, got {body.encoding_format!r}"
        raise InvalidRequest(said, "encoding_format")
    if body.dimensions is not None and not 1 <= body.dimensions <= MOST_DIMENSIONS:
        raise InvalidRequest(f"dimensions must be between 1 and {MOST_DIMENSIONS}, got {body.dimensions}", "dimensions")
    refuse_answers(body)


def refuse_answers(body: schema.GenerationBody) -> None:
    """Raises InvalidRequest: a field is about generated answers, of which there are none here."""
    for name in schema.OF_ANSWERS:
        if getattr(body, name) not in (None, False):
            raise InvalidRequest(f"{name} is of answers, and none is written here", name)


def check_count(count: int, param: str) -> None:
    """Raises InvalidRequest."""
    if count > MOST_TEXTS:
        raise InvalidRequest(f"{param}: at most {MOST_TEXTS} texts, got {count}", param)


def counted(answer: Answer) -> dict[str, Any]:
    """Returns usage without completion tokens."""
    said = usage(answer)
    return {name: said[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details", "tandem")}


class EmbeddingFrame(Unstreamed):
    """The vectors as one body."""

    def __init__(self, body: schema.EmbeddingBody, found: ParsedBody, answer: Answer, created: int) -> None:
        self._answer, self._as_text = answer, body.encoding_format == "base64"

    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        data = []
        for index, delta in enumerate(deltas):
            await asyncio.sleep(0)  # vectors have thousands of numbers
            data.append({"object": "embedding", "index": index, "embedding": self._encoded(delta.tokens.embedding)})
        frame = {"object": "list", "data": data, "model": self._answer.request.model.name}
        return {**frame, "usage": counted(self._answer)}

    def _encoded(self, vector: Sequence[float]) -> list[float] | str:
        if not self._as_text:
            return list(vector)
        return base64.b64encode(pack(f"<{len(vector)}f", *vector)).decode()
