"""POST /v1/score and /v1/rerank: how alike texts are, by the cosine between their embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from math import hypot
from operator import mul
from typing import Any

from services.gateway.apis.embeddings.embeddings import Pooled, check_count, counted, refuse_answers
from services.gateway.apis.openai import schema
from services.gateway.bodies import Incoming, PromptBounds
from services.gateway.directory import LLM
from services.gateway.door import CheckTurn, ParsedBody, Unstreamed
from services.gateway.errors import InvalidRequest
from services.gateway.generation import Answer, Delta
from services.gateway.untrusted import ChatTemplate

# Stands for a text that a helper process removed.
TAKEN = "-"


class ScoreReader(schema.JsonReader[schema.ScoreBody]):
    field, taken = "text_2", TAKEN

    def parse(self, data: bytes) -> schema.ScoreBody:
        found = schema.validated(schema.ScoreBody, data)
        refuse_answers(found)
        return found

    def prompts(self, body: schema.ScoreBody, bounds: PromptBounds, template: ChatTemplate | None) -> list[str]:
        first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        if len(first) not in (1, len(second)):
            said = f"text_2 must have as many texts as text_1, or text_1 one: they have {len(second)} and {len(first)}"
            raise InvalidRequest(said, "text_2")
        check_count(len(first) + len(second), "text_2")
        return first + second

    def dump(self, body: schema.ScoreBody) -> bytes:
        body.text_1 = [TAKEN] * len(_texts(body.text_1, "text_1"))
        return super().dump(body)


class RerankReader(schema.JsonReader[schema.RerankBody]):
    field, taken = "documents", TAKEN

    def parse(self, data: bytes) -> schema.RerankBody:
        found = schema.validated(schema.RerankBody, data)
        refuse_answers(found)
        if not found.query:
            raise InvalidRequest("query must be a text that is not empty", "query")
        if found.top_n is not None and found.top_n < 1:
            raise InvalidRequest(f"top_n must be at least 1, got {found.top_n}", "top_n")
        return found

    def prompts(self, body: schema.RerankBody, bounds: PromptBounds, template: ChatTemplate | None) -> list[str]:
        documents = _texts(body.documents, "documents")
        check_count(1 + len(documents), "documents")
        return [body.query, *documents]

    def dump(self, body: schema.RerankBody) -> bytes:
        body.query = TAKEN
        return super().dump(body)


SCORE, RERANK = ScoreReader(), RerankReader()


async def read_score(llm: LLM, body: Incoming[schema.ScoreBody], check_turn: CheckTurn) -> ParsedBody:
    """Raises GatewayError."""
    found, terms = body.body, schema.terms_of(body.body)
    asked = Pooled(terms, check_turn(terms, 0), found.truncate_prompt_tokens)
    return await asked.parsed(llm, llm.prompts_in(body), "text_2", partial(ScoreFrame, found))


async def read_rerank(llm: LLM, body: Incoming[schema.RerankBody], check_turn: CheckTurn) -> ParsedBody:
    """Raises GatewayError."""
    found, terms = body.body, schema.terms_of(body.body)
    asked = Pooled(terms, check_turn(terms, 0), found.truncate_prompt_tokens)
    said = llm.prompts_in(body)
    found.documents = said[1:]
    return await asked.parsed(llm, said, "documents", partial(RerankFrame, found))


def _texts(said: Any, param: str) -> list[str]:
    """Returns the texts of a field: one or a list, each a string or {"text": ...}."""
    found = said if isinstance(said, list) else [said]
    if not found:
        raise InvalidRequest(f"{param} must not be empty", param)
    texts: list[str] = []
    for i, one in enumerate(found):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str) or not text:
            where = f"{param}[{i}]" if isinstance(said, list) else param
            raise InvalidRequest(f"{where} must be a text that is not empty", where)
        texts.append(text)
    return texts


async def _cosines(first: Sequence[Delta], second: Sequence[Delta]) -> list[float]:
    """Returns the cosine of each of the second with its counterpart, or the only one, of the first."""
    left = [_unit(delta) for delta in first]
    found = []
    for i, delta in enumerate(second):
        await asyncio.sleep(0)  # a vector is some thousand numbers
        found.append(sum(map(mul, left[i if len(left) > 1 else 0], _unit(delta))))
    return found


def _unit(delta: Delta) -> list[float]:
    vector = delta.tokens.embedding
    length = max(hypot(*vector), 1e-12)
    return [value / length for value in vector]


class ScoreFrame(Unstreamed):
    """The scores as one body."""

    def __init__(self, body: schema.ScoreBody, found: ParsedBody, answer: Answer, created: int) -> None:
        self._answer, self._created = answer, created
        self._num_first = len(body.text_1) if isinstance(body.text_1, list) else 1

    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        scores = await _cosines(deltas[: self._num_first], deltas[self._num_first :])
        request = self._answer.request
        return {
            "id": f"score-{request.request_id}", "object": "list", "created": self._created,
            "model": request.model.name, "usage": counted(self._answer),
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        }  # fmt: skip


class RerankFrame(Unstreamed):
    """The documents as one body, best first."""

    def __init__(self, body: schema.RerankBody, found: ParsedBody, answer: Answer, created: int) -> None:
        self._answer, self._body = answer, body

    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        scores = await _cosines(deltas[:1], deltas[1:])
        request = self._answer.request
        return {
            "id": f"rerank-{request.request_id}", "model": request.model.name, "usage": counted(self._answer),
            "results": list(self._results(scores)),
        }  # fmt: skip

    def _results(self, scores: Sequence[float]) -> Iterator[dict[str, Any]]:
        best = sorted(range(len(scores)), key=lambda i: -scores[i])
        for i in best[: self._body.top_n]:
            document = {} if self._body.return_documents is False else {"document": {"text": self._body.documents[i]}}
            yield {"index": i, **document, "relevance_score": scores[i]}
