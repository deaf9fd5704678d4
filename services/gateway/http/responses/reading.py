"""A body of Responses, read as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from pydantic_core import to_json

from services.gateway.admission import tier_served
from services.gateway.bodies import BodyReader, ChatPrompt, Incoming, PromptBounds, Reduced, rendered, small
from services.gateway.directory import LLM
from services.gateway.errors import InvalidRequest
from services.gateway.http.chat import CHAT, read_chat
from services.gateway.http.format import CheckTurn, ParsedBody
from services.gateway.http.responses.background import Background
from services.gateway.http.responses.conversion import chat_of
from services.gateway.http.responses.events import ResponseEvents
from services.gateway.http.responses.fitting import newest, read_fitting, rendered_fitting
from services.gateway.http.responses.recalling import Keeping, items_of, recalled
from services.gateway.http.responses.schema import ResponseBody, read_body
from services.gateway.http.responses.tools import Toolbox, read_toolbox
from services.gateway.untrusted import ChatTemplate
from tandem.ids import RandomIds

# Stands for the items that a helper process has taken out.
TAKEN = "in the prompt"
# A chat's fields, and what they are called here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tools": "tools",
}
TEXT = {"type": "text"}


class ResponseReader(BodyReader[ResponseBody]):
    def parse(self, data: bytes) -> ResponseBody:
        return read_body(data)

    def prompts(self, body: ResponseBody, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt:
        with own_names():
            asked = CHAT.parse(to_json(chat_of(body, read_toolbox(body.tools or (), body.tool_choice))))
            return CHAT.prompts(asked, bounds, template)

    def param(self, body: ResponseBody) -> str:
        return "input"

    def dump(self, body: ResponseBody) -> bytes:
        """With its sampling parameters, which are no fields of its own."""
        body.input = TAKEN
        return small(to_json(body.model_dump(exclude_unset=True)), "input")

    def reduce(
        self, data: bytes, bounds: PromptBounds, template: ChatTemplate | None, most: int | None = None
    ) -> Reduced:
        """`most`: how many bytes of items the prompt is made of, the newest ones."""
        body = self.parse(data)
        needed = body.store is not False or body.conversation is not None or body.previous_response_id is not None
        unique = RandomIds()()  # made here: ids that were made before the helper's fork, other forks have, too
        items = items_of(body.input, unique) if needed or body.truncation == "auto" else b"[]"
        body.input = body.input if most is None else newest(body.input, most)

        def render() -> str:
            chat = self.prompts(body, bounds, template)
            with own_names():
                return rendered(chat, template, bounds)

        text = rendered_fitting(body, render)
        return Reduced(self.dump(body), [text], items)


RESPONSE = ResponseReader()


async def read_response(llm: LLM, body: Incoming[ResponseBody], check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    said = body.body
    whole, keeping = await _with_recalled(llm, body)
    box = read_toolbox(whole.body.tools or (), whole.body.tool_choice)

    async def read(asked: ResponseBody, reduced: Reduced | None) -> ParsedBody:
        with own_names():
            chat = CHAT.parse(to_json(chat_of(asked, box)))
            return await read_chat(llm, Incoming(CHAT, chat, body.owner, reduced), check_turn)

    parsed = await read_fitting(llm, whole, RESPONSE.reduce, read)
    echo = _echo(said, box, parsed) | {"store": keeping is not None and keeping.stores}
    if keeping and keeping.conversation:
        echo["conversation"] = {"id": keeping.conversation}
    frame = partial(ResponseEvents, llm.shared.new_id, echo, box.tools, keeping)
    detach = Background(llm, keeping.kept, keeping.items).start if said.background and keeping else None
    return replace(parsed, param="input", envelope=frame, detach=detach)


async def count_input(llm: LLM, body: Incoming[ResponseBody]) -> dict[str, Any]:
    """Returns how many tokens a response to this body would read.

    Raises:
        GatewayError
    """
    whole, _ = await _with_recalled(llm, body)
    with own_names():
        text = await llm.text_of(whole)
    ids = await llm.encode_chat(text, llm.shared.access.cache_salt(body.owner, ""))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


async def _with_recalled(llm: LLM, body: Incoming[ResponseBody]) -> tuple[Incoming[ResponseBody], Keeping | None]:
    whole, keeping = await recalled(llm, body)
    return body if whole is None else await llm.read(RESPONSE, whole, body.owner), keeping


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
