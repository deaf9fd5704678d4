"""The bodies of OpenAI's two generation endpoints, and vLLM's extensions of them.

Types only: ranges are checked where both doors meet (`tandem/sampling.py`). A field that this server knows and does
not do is refused by name unless it asks for what happens anyway; one that nobody knows is ignored. null means unsaid.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model

from services.gateway.bodies import BodyReader, small
from services.gateway.door import Terms
from services.gateway.errors import InvalidRequest
from services.gateway.generation import read_speculative
from tandem.sampling import INTERNAL, TYPES

# Unsupported fields, refused unless they have one of these values, which change nothing.
AS_IS: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),  # see `as_is` of a body
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "include_obfuscation": (False, True),
}
MAX_HINT = 512
# A word for how an answer is to be made, which does not constrain its content. Unknown words count as none.
Hint = Annotated[str, Field(max_length=MAX_HINT)]
# JSON integers have any length; bodies take those of 128 bits. A field's own range is checked later.
Int = Annotated[int, Field(ge=-(2**127), lt=2**127), WithJsonSchema({"type": "integer"})]


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, defer_build=True)
    # Values of AS_IS that change nothing in this body.
    as_is: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Names of sampling parameters that mean something else in this body.
    not_sampling: ClassVar[frozenset[str]] = frozenset()


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculativeBody(Body):
    model_config = ConfigDict(extra="forbid")

    method: str
    num_tokens: Int | None = None


class HeldBody(Body):
    """vLLM's fields for the form of an answer."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class GenerationBody(HeldBody):
    """Fields that chats and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    service_tier: Hint | None = None
    priority: Int | None = None
    user: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: Int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    speculative: SpeculativeBody | None = None
    # Taken, for they change nothing here.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(GenerationBody):
    as_is = {"add_special_tokens": (True,)}

    prompt: Any
    echo: bool | None = None
    best_of: Int | None = None


# Fields of GenerationBody that embeddings have no use for.
OF_ANSWERS = (
    "stream", "stream_options", "n", "return_token_ids", "return_tokens_as_token_ids", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "speculative",
)  # fmt: skip


class EmbeddingBody(GenerationBody):
    input: Any
    encoding_format: str | None = None
    dimensions: Int | None = None


class ScoreBody(GenerationBody):
    text_1: Any
    text_2: Any


class RerankBody(GenerationBody):
    query: str
    documents: Any
    top_n: Int | None = None
    return_documents: bool | None = None


class ChatMessage(Body):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatBody(GenerationBody):
    as_is = {"add_special_tokens": (False,)}  # the chat template writes them

    messages: list[ChatMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Hint | None = None
    include_reasoning: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    # Taken, for they change nothing here.
    verbosity: Hint | None = None
    prediction: dict[str, Any] | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Hint | None = None
    tools: list[Any] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Int]


class LoadAdapterBody(Body):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class UnloadAdapterBody(Body):
    lora_name: str


M = TypeVar("M", bound=Body)
B = TypeVar("B", bound=GenerationBody)
# Parameters that OpenAI types more loosely than SamplingParams.
LOOSE = {"stop": Strings, "bad_words": Strings}


@cache
def sampling_fields(schema: type[Body]) -> frozenset[str]:
    """Returns the sampling parameters that clients may set, but for those that the schema has in a form of its own."""
    return frozenset(TYPES.keys() - INTERNAL - schema.model_fields.keys() - schema.not_sampling)


@cache
def with_sampling(schema: type[M]) -> type[M]:
    """Returns the schema with a field added for each sampling parameter that it does not have in its own form."""
    fields: dict[str, Any] = {
        name: (LOOSE.get(name, _bounded(TYPES[name])) | None, None) for name in sampling_fields(schema)
    }
    return create_model(schema.__name__, __base__=schema, **fields)


def _bounded(kind: Any) -> Any:
    """Returns the type with its integers bounded, nested ones too."""
    if kind is int:
        return Int
    inner = tuple(map(_bounded, get_args(kind)))
    if get_origin(kind) is UnionType:
        return reduce(or_, inner)
    return get_origin(kind)[inner] if inner else kind


def validated(schema: type[M], body: bytes) -> M:
    """Raises InvalidRequest: naming the first field that is wrong."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _complaint(error) from None


def read(schema: type[B], body: bytes) -> B:
    """Returns the body of a generating request, with its sampling parameters.

    Raises:
        InvalidRequest: naming the first field that is wrong.
    """
    found: B = validated(with_sampling(schema), body)
    _refuse_extras(found, "")
    if found.n is not None and found.n < 1:
        raise InvalidRequest(f"n must be at least 1, got {found.n}", "n")
    if found.stream_options is not None:
        if not found.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        _refuse_extras(found.stream_options, "stream_options.")
    return found


class JsonReader(BodyReader[M]):
    """Reads JSON bodies whose prompts are in one field. `taken`: the field's value in a reduced large body."""

    kind: type[M]
    field: str
    taken: Any = None

    def parse(self, data: bytes) -> M:
        return validated(self.kind, data)

    def param(self, body: M) -> str:
        return self.field

    def dump(self, body: M) -> bytes:
        setattr(body, self.field, self.taken)
        return dumped(body, self.field)


def given_in(found: Body, schema: type[Body], also: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns the sampling parameters of a body that this schema read.

    Args:
        also: fields of the schema's own that are sampling parameters.
    """
    names = found.model_fields_set & (sampling_fields(schema) | also)
    return {name: value for name in names if (value := getattr(found, name)) is not None}


def terms_of(found: GenerationBody) -> Terms:
    """Returns the body's terms. Raises InvalidRequest."""
    said = found.speculative
    return Terms(
        model=found.model,
        user=found.user or "",
        service_tier=found.service_tier,
        priority=found.priority,
        streamed=bool(found.stream),
        cache_salt=found.cache_salt or "",
        speculative=read_speculative(said.method, said.num_tokens) if said else None,
    )


def dumped(found: Body, prompt: str) -> bytes:
    """Returns the body as JSON, without fields that no answer depends on.

    Args:
        prompt: the field that the prompts were in.

    Raises:
        InvalidRequest: it is large.
    """
    (found.model_extra or {}).clear()
    return small(found.model_dump_json(exclude_unset=True, exclude={"metadata", "prediction"}).encode(), prompt)


def _refuse_extras(body: Body, prefix: str) -> None:
    for name, value in (body.model_extra or {}).items():
        if value is not None and name in AS_IS and value not in body.as_is.get(name, AS_IS[name]):
            raise InvalidRequest(
                f"{prefix}{name}: not supported by this server", prefix + name, "unsupported_parameter"
            )


def _complaint(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_input=False)[0]
    if problem["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {problem['ctx']['error']}")
    param = _param(problem["loc"])
    if problem["type"] == "missing":
        return InvalidRequest(f"{param} is required", param, "missing_required_parameter")
    if not param:
        return InvalidRequest("the body must be a JSON object")
    return InvalidRequest(f"{param}: {problem['msg'][0].lower()}{problem['msg'][1:]}", param, "invalid_type")


def _param(location: tuple[int | str, ...]) -> str:
    text = ""
    if location[-1:] == ("[key]",):  # a mapping's key is wrong
        location = location[:-2]
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
