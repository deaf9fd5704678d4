"""A body of Responses, read as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from pydantic_core import to_json

from services.gateway.access import Caller
from services.gateway.admission import tier_served
from services.gateway.bodies import Incoming, PromptBounds, is_large, rendered, small
from services.gateway.errors import InvalidRequest
from services.gateway.http.chat import read_chat, read_messages, template_options
from services.gateway.http.format import CheckTurn, ParsedBody
from services.gateway.http.responses.background import Background
from services.gateway.http.responses.conversion import chat_of
from services.gateway.http.responses.events import ResponseEvents
from services.gateway.http.responses.fitting import newest, read_fitting, rendered_fitting
from services.gateway.http.responses.recalling import Keeping, items_of, recalled
from services.gateway.http.responses.schema import ResponseBody, read_body
from services.gateway.http.responses.tools import Toolbox, read_toolbox
from services.gateway.http.schema import ChatBody, validated
from services.gateway.llm import LLM
from services.gateway.tools import read_tools
from services.gateway.untrusted import ChatTemplate, TemplateOptions
from tandem.ids import RandomIds

# A chat's fields, and what they are called here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tools": "tools",
}
TEXT = {"type": "text"}


async def read_response(llm: LLM, body: Incoming, check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    said = read_body(body.fields)
    found, whole, keeping = await _with_recalled(llm, said, body)
    if whole.prompts is not None:
        found.input = "in the prompt"
    box = read_toolbox(found.tools or (), found.tool_choice)

    async def read(asked: ResponseBody, prompts: Sequence[str | bytes] | None) -> ParsedBody:
        with own_names():
            return await read_chat(llm, Incoming(to_json(chat_of(asked, box)), prompts), check_turn)

    parsed = await read_fitting(llm, found, whole, reduce_response, read)
    echo = _echo(said, box, parsed) | {"store": keeping is not None and keeping.stores}
    if keeping and keeping.conversation:
        echo["conversation"] = {"id": keeping.conversation}
    frame = partial(ResponseEvents, llm.new_id, echo, box.tools, keeping)
    detach = Background(llm, keeping.kept, keeping.items).start if said.background and keeping else None
    return replace(parsed, param="input", envelope=frame, detach=detach)


async def count_input(llm: LLM, body: Incoming, client: Caller) -> dict[str, Any]:
    """Returns how many tokens a response to this body would read.

    Raises:
        GatewayError
    """
    said = read_body(body.fields)
    llm.served(said.model, client)
    found, whole, _ = await _with_recalled(llm, said, body)
    text = whole.text
    if text is None:
        with own_names():
            text = await llm.render_chat(*_rendering(found, read_toolbox(found.tools or (), found.tool_choice)))
    ids = await llm.encode_chat(text, llm.access.cache_salt(body.owner, ""))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


async def _with_recalled(llm: LLM, said: ResponseBody, body: Incoming) -> tuple[ResponseBody, Incoming, Keeping | None]:
    whole, keeping = await recalled(llm, said, body)
    if whole is body:
        return said, body, keeping
    if is_large(whole.fields):
        whole = await llm.reduced(reduce_response, whole.fields, body.owner)
    return read_body(whole.fields), whole, keeping


def _rendering(found: ResponseBody, box: Toolbox) -> tuple[list[Mapping[str, Any]], TemplateOptions]:
    asked = validated(ChatBody, to_json(chat_of(found, box)))
    use = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    return read_messages(asked.messages), template_options(asked, use)


def reduce_response(
    body: bytes, bounds: PromptBounds, template: ChatTemplate | None, most: int | None = None
) -> Incoming:
    """In the helper process. `most`: how many bytes of items the prompt is made of, the newest ones.

    Raises:
        InvalidRequest
    """
    found = read_body(body)
    box = read_toolbox(found.tools or (), found.tool_choice)
    needed = found.store is not False or found.conversation is not None or found.previous_response_id is not None
    unique = RandomIds()()  # made here: ids that were made before the helper's fork, other forks have, too
    items = items_of(found.input, unique) if needed or found.truncation == "auto" else b"[]"
    found.input = found.input if most is None else newest(found.input, most)

    def render() -> str:
        return rendered(*_rendering(found, box), template, bounds)

    with own_names():
        text = rendered_fitting(found, render)
    found.input = ""
    return Incoming(small(to_json(found.model_dump(exclude_unset=True)), "input"), [text], items)


@contextmanager
def own_names() -> Iterator[None]:
    """Errors name a response's fields, not those of the chat that it was made into."""
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error) from None


def _renamed(error: InvalidRequest) -> InvalidRequest:
    first, *_ = (error.param or "").replace("[", ".").split(".")
    if first not in NAMES or error.param is None:
        message = error.message.replace("response_format", NAMES["response_format"])
        return InvalidRequest(message, error.param, error.code)
    message, param = (
        text.replace(first, NAMES[first], 1).replace(".function.", ".") for text in (error.message, error.param)
    )
    return InvalidRequest(message, param, error.code)


def _echo(body: ResponseBody, box: Toolbox, parsed: ParsedBody) -> dict[str, Any]:
    """Fields of its request that a response repeats, as they were served.

    Raises:
        InvalidRequest
    """
    echo: dict[str, Any] = {
        "background": bool(body.background), "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens, "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id, "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier, "service_tier": tier_served(body.service_tier), "store": False,
        "temperature": parsed.sampling.temperature, "top_p": parsed.sampling.top_p, "top_logprobs": 0,
        "text": {"format": _json((body.text and body.text.format) or TEXT, "text.format"), "verbosity": "medium"},
        "tool_choice": _json(body.tool_choice or "auto", "tool_choice"), "tools": _json(box.said, "tools"),
        "truncation": body.truncation or "disabled", "user": body.user,
    }  # fmt: skip
    return echo


def _json(value: Any, param: str) -> orjson.Fragment:
    """Made once for all events that say it.

    Raises:
        InvalidRequest: there is a number in it that others could not read.
    """
    try:
        return orjson.Fragment(orjson.dumps(value))
    except TypeError as error:
        raise InvalidRequest(f"{param}: {error}", param) from None
