"""Readers of gRPC requests. A large request stays bytes until a helper process parses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from services.gateway.bodies import (
    LARGE,
    MANY,
    MOST_BESIDE,
    BodyReader,
    ChatPrompt,
    Prompt,
    PromptBounds,
    Reduced,
    truncated,
)
from services.gateway.errors import InvalidRequest
from services.gateway.grpc.messages import messages_of, options_of, tools_of
from services.gateway.model import ModelAsked
from services.gateway.tools import ToolUse
from services.gateway.untrusted import ChatTemplate
from tandem.grammar import MAX_CHOICES
from tandem.sampling import INTERNAL, InvalidParameter, SamplingParams, given_in
from tandem.v1 import llm_pb2

# The most messages, calls and tools to read on the event loop, as each takes time to check and render.
MANY_PARTS = 1000
M = TypeVar("M")


def unless_large(parse: Callable[[bytes], M], is_large: Callable[[M], bool]) -> Callable[[bytes], M | bytes]:
    """Returns a parser that leaves large messages as bytes."""

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


class GenerateReader(BodyReader[llm_pb2.GenerateRequest]):
    """Reads a GenerateRequest, or the one within a GenerateUnaryRequest."""

    def __init__(self, within: bool) -> None:
        self._within = within

    def parse(self, data: bytes) -> llm_pb2.GenerateRequest:
        return llm_pb2.GenerateRequest.FromString(data)

    def prompts(
        self, body: llm_pb2.GenerateRequest, bounds: PromptBounds, template: ChatTemplate | None
    ) -> ChatPrompt | Sequence[Prompt]:
        match body.WhichOneof("input"):
            case "prompt":
                return [body.prompt]
            case "token_ids":
                return [truncated(list(body.token_ids.ids), body.truncate_prompt_tokens or None)]
            case "messages":
                return chat_in(body, tools_of(body))
        raise InvalidRequest("one of prompt, messages or token_ids is required", "prompt")

    def param(self, body: llm_pb2.GenerateRequest) -> str:
        return body.WhichOneof("input") or "prompt"

    def dump(self, body: llm_pb2.GenerateRequest) -> bytes:
        """Returns the request with its prompt emptied; the field that had the prompt is still the one that is set."""
        match body.WhichOneof("input"):
            case "prompt":
                body.prompt = ""
            case "token_ids":
                body.token_ids.Clear()
                body.token_ids.SetInParent()
            case "messages":
                body.messages.ClearField("messages")
                body.messages.ClearField("chat_template_kwargs")
                body.messages.SetInParent()
        fields = body.SerializeToString()
        if len(fields) > MOST_BESIDE:
            said = f"besides its prompt the request must not have more than {MOST_BESIDE} bytes"
            raise InvalidRequest(said, code="body_too_large")
        return fields

    def reduce(self, data: bytes, bounds: PromptBounds, template: ChatTemplate | None) -> Reduced:
        try:
            request = self._parsed(data)
        except DecodeError:
            raise InvalidRequest("the request is not a message of the kind that this call takes") from None
        request.DiscardUnknownFields()
        _check_sampling(request.sampling, bounds)
        if (count := len(request.structured_outputs.choice.texts)) > MAX_CHOICES:
            name = "structured_outputs.choice"
            raise InvalidRequest(f"{name} must have at most {MAX_CHOICES} strings, got {count}", name)
        return self.reduced(request, bounds, template)

    def model_asked(self, data: bytes) -> ModelAsked:
        """Returns the model that the request names; none if it cannot be parsed."""
        try:
            request = self._parsed(data)
        except DecodeError:
            return ModelAsked()
        return ModelAsked.of({"model": request.model, "user": request.tenant})

    def _parsed(self, data: bytes) -> llm_pb2.GenerateRequest:
        """Raises DecodeError."""
        return llm_pb2.GenerateUnaryRequest.FromString(data).generate if self._within else self.parse(data)


STREAMED, UNARY = GenerateReader(within=False), GenerateReader(within=True)


def chat_in(request: llm_pb2.GenerateRequest, use: ToolUse | None) -> ChatPrompt:
    """Raises InvalidRequest."""
    return ChatPrompt(messages_of(request.messages), options_of(request.messages, use))


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
