"""A GenerateRequest of what is said in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from tandem_client.stubs.tandem.v1 import llm_pb2

# Text to continue, its tokens, messages of a chat ({"role", "content"}), or a whole request.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | llm_pb2.GenerateRequest


class Options(TypedDict, total=False):
    """The options that are used most; a GenerateRequest takes everything."""

    model: str
    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int
    stop: Sequence[str]
    seed: int | None
    n: int
    json_schema: Mapping[str, object]
    request_id: str
    tenant: str


def request_of(prompt: Prompt, options: Options) -> llm_pb2.GenerateRequest:
    if isinstance(prompt, llm_pb2.GenerateRequest):
        return _whole(prompt, options)
    request = llm_pb2.GenerateRequest(
        model=options.get("model", ""),
        n=options.get("n", 0),
        request_id=options.get("request_id", ""),
        tenant=options.get("tenant", ""),
        sampling=llm_pb2.SamplingParams(
            max_tokens=options.get("max_tokens"),
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            stop=options.get("stop", ()),
            seed=options.get("seed"),
        ),
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        _put(request, prompt)
    if "json_schema" in options:
        request.structured_outputs.json = json.dumps(options["json_schema"])
    return request


def _whole(request: llm_pb2.GenerateRequest, options: Options) -> llm_pb2.GenerateRequest:
    """A copy, for a model may be put into it."""
    if options:
        raise TypeError(f"a GenerateRequest has all of its options in itself: {', '.join(options)}")
    copy = llm_pb2.GenerateRequest()
    copy.CopyFrom(request)
    return copy


def _put(request: llm_pb2.GenerateRequest, prompt: Sequence[int] | Sequence[Mapping[str, str]]) -> None:
    for part in prompt:
        if isinstance(part, int):
            request.token_ids.ids.append(part)
        else:
            request.messages.messages.add(role=part["role"], content=part["content"])


def first_of(models: Sequence[llm_pb2.Model]) -> str:
    if not models:
        raise LookupError("the gateway serves no model")
    return models[0].id
