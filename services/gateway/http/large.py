"""Reads large bodies, in the helper process: see services/gateway/bodies.py. Nothing here runs on the loop."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

from services.gateway.bodies import Incoming, PromptBounds, rendered, small
from services.gateway.generation import check_prompt, truncated
from services.gateway.http import schema
from services.gateway.http.chat import read_messages, template_options
from services.gateway.http.completions import prompts_of
from services.gateway.http.embeddings import check_embeddings, inputs_of
from services.gateway.http.scores import take_rerank, take_score
from services.gateway.tools import read_tools
from services.gateway.untrusted import ChatTemplate

B = TypeVar("B", bound=schema.Body)


def completion(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found, _ = schema.read(schema.CompletionBody, body)
    said = prompts_of(found.prompt)
    bounds.check_choices(len(said), 1)
    prompts = [_bounded(prompt, found.truncate_prompt_tokens, bounds, "prompt") for prompt in said]
    found.prompt = None
    return Incoming(_fields(found, "prompt"), prompts)


def embeddings(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found = schema.validated(schema.EmbeddingBody, body)
    check_embeddings(found)
    said = inputs_of(found, bounds)
    prompts = [_bounded(prompt, found.truncate_prompt_tokens, bounds, "input") for prompt in said]
    found.input = None
    return Incoming(_fields(found, "input"), prompts)


def score(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found = schema.validated(schema.ScoreBody, body)
    texts = take_score(found, bounds)
    return Incoming(_fields(found, "text_2"), [_bounded(text, None, bounds, "text_2") for text in texts])


def rerank(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found = schema.validated(schema.RerankBody, body)
    texts = take_rerank(found, bounds)
    found.query = ""
    return Incoming(_fields(found, "documents"), [_bounded(text, None, bounds, "documents") for text in texts])


def chat(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found, _ = schema.read(schema.ChatBody, body)
    use = read_tools(found.tools, found.tool_choice, found.parallel_tool_calls)
    text = rendered(read_messages(found.messages), template_options(found, use), template, bounds)
    found.messages = []
    return Incoming(_fields(found, "messages"), [text])


def tokenize(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found = schema.validated(schema.TokenizeBody, body)
    schema.check_tokenize(found)
    text = found.prompt or ""
    if found.messages is not None:
        options = template_options(found, read_tools(found.tools, None, None))
        text = rendered(read_messages(found.messages), options, template, bounds)
        found.messages = []
    else:
        found.prompt = ""
    bounds.check_characters(len(text), "prompt")
    return Incoming(_fields(found, "prompt"), [text])


def detokenize(body: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    found = schema.validated(schema.DetokenizeBody, body)
    ids = _bounded(found.tokens, None, bounds, "tokens")
    found.tokens = []
    return Incoming(_fields(found, "tokens"), [ids])


def _bounded(prompt: str | Sequence[int], keep: int | None, bounds: PromptBounds, param: str) -> str | bytes:
    if isinstance(prompt, str):
        bounds.check_characters(len(prompt), param)
        return prompt
    ids = truncated(prompt, keep)
    bounds.check_tokens(len(ids), param)
    check_prompt(ids, bounds.vocab_size, param)
    return array("I", ids).tobytes()


def _fields(found: schema.Body, prompt: str) -> bytes:
    """All but what no answer depends on."""
    (found.model_extra or {}).clear()
    return small(found.model_dump_json(exclude_unset=True, exclude={"metadata", "prediction"}).encode(), prompt)
