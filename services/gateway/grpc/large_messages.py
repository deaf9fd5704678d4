"""Large gRPC messages, and their preparation in a helper process: see services/gateway/bodies.py."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from services.gateway.bodies import LARGE, MANY, MOST_BESIDE, Incoming, PromptBounds, rendered
from services.gateway.errors import InvalidRequest
from services.gateway.generation import check_prompt, truncated
from services.gateway.grpc.messages import messages_of, options_of, tools_of
from services.gateway.model import ModelAsked
from services.gateway.untrusted import ChatTemplate
from tandem.grammar import MAX_CHOICES
from tandem.sampling import INTERNAL, InvalidParameter, SamplingParams, given_in
from tandem.v1 import llm_pb2

# Messages, calls and tools: each takes a while to check and render.
MANY_PARTS = 1000
M = TypeVar("M")


def unless_large(parse: Callable[[bytes], M], is_large: Callable[[M], bool]) -> Callable[[bytes], M | bytes]:
    """Parses a message; one that is large stays bytes."""

    def parsed(data: bytes) -> M | bytes:
        if len(data) > LARGE:
            return data
        found = parse(data)
        return data if is_large(found) else found

    return parsed


def has_many_parts(request: llm_pb2.GenerateRequest) -> bool:
    messages = request.messages.messages
    num_parts = len(messages) + len(request.tools)
    return num_parts > MANY_PARTS or num_parts + sum(len(one.tool_calls) for one in messages) > MANY_PARTS


def streamed(data: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    return _reduced(llm_pb2.GenerateRequest, data, lambda request: request, bounds, template)


def unary(data: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Incoming:
    """
    Raises:
        InvalidRequest
    """
    return _reduced(llm_pb2.GenerateUnaryRequest, data, lambda request: request.generate, bounds, template)


def asked_in_streamed(data: bytes) -> ModelAsked:
    return _asked_in(llm_pb2.GenerateRequest, data, lambda request: request)


def asked_in_unary(data: bytes) -> ModelAsked:
    return _asked_in(llm_pb2.GenerateUnaryRequest, data, lambda request: request.generate)


def _asked_in(kind: Any, data: bytes, inside: Callable[[Any], Any]) -> ModelAsked:
    """Nothing where it cannot be read."""
    try:
        request = inside(kind.FromString(data))
    except DecodeError:
        return ModelAsked()
    return ModelAsked.of({"model": request.model, "user": request.tenant})


def _reduced(
    kind: Any, data: bytes, inside: Callable[[Any], Any], bounds: PromptBounds, template: ChatTemplate | None
) -> Incoming:
    try:
        request: llm_pb2.GenerateRequest = inside(kind.FromString(data))
    except DecodeError:
        raise InvalidRequest("the request is not a message of the kind that this call takes") from None
    request.DiscardUnknownFields()
    _check_sampling(request.sampling, bounds)
    if (count := len(request.structured_outputs.choice.texts)) > MAX_CHOICES:
        name = "structured_outputs.choice"
        raise InvalidRequest(f"{name} must have at most {MAX_CHOICES} strings, got {count}", name)
    prompt = _take_prompt(request, bounds, template)
    fields = request.SerializeToString()
    if len(fields) > MOST_BESIDE:
        said = f"besides its prompt the request must not have more than {MOST_BESIDE} bytes"
        raise InvalidRequest(said, code="body_too_large")
    return Incoming(fields, [prompt])


def _check_sampling(said: llm_pb2.SamplingParams, bounds: PromptBounds) -> None:
    for name in INTERNAL:
        said.ClearField(name)
    for name, ids in (("stop_token_ids", said.stop_token_ids), ("allowed_token_ids", said.allowed_token_ids)):
        if len(ids) > MANY:
            raise InvalidRequest(f"{name} must have at most {MANY} ids, got {len(ids)}", name)
    try:
        SamplingParams.of(given_in(said)).check_vocabulary(bounds.vocab_size)
    except InvalidParameter as error:
        raise InvalidRequest(f"{error.name} {error.problem}", error.name) from None


def _take_prompt(request: llm_pb2.GenerateRequest, bounds: PromptBounds, template: ChatTemplate | None) -> str | bytes:
    """Takes the prompt out; the request still shows which of the three fields had it."""
    match request.WhichOneof("input"):
        case "prompt":
            text, request.prompt = request.prompt, ""
            bounds.check_characters(len(text), "prompt")
            return text
        case "token_ids":
            ids = truncated(request.token_ids.ids, request.truncate_prompt_tokens or None)
            bounds.check_tokens(len(ids), "token_ids")
            check_prompt(ids, bounds.vocab_size, "token_ids")
            packed = array("I", ids[:]).tobytes()
            request.token_ids.Clear()
            request.token_ids.SetInParent()
            return packed
        case "messages":
            said = request.messages
            text = rendered(messages_of(said), options_of(said, tools_of(request)), template, bounds)
            said.ClearField("messages")
            said.ClearField("chat_template_kwargs")
            said.SetInParent()
            return text
    raise InvalidRequest("one of prompt, messages or token_ids is required", "prompt")
