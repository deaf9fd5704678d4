"""A body of Responses, read as the chat that it asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from pydantic_core import to_json

from services.gateway.bodies import Incoming
from services.gateway.errors import InvalidRequest
from services.gateway.http.chat import read_chat
from services.gateway.http.format import TIERS_SERVED, CheckTurn, ParsedBody
from services.gateway.http.responses.conversion import chat_of
from services.gateway.http.responses.events import ResponseEvents
from services.gateway.http.responses.schema import ResponseBody, read_body
from services.gateway.llm import LLM

# A chat's fields, and what they are called here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


async def read_response(llm: LLM, body: Incoming, check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found = read_body(body.fields)
    if body.prompts is not None:
        found.input = "in the prompt"
    try:
        parsed = await read_chat(llm, Incoming(to_json(chat_of(found)), body.prompts), check_turn)
    except InvalidRequest as error:
        raise _renamed(error) from None
    echo = _echo(found, parsed)
    return replace(parsed, param="input", envelope=partial(ResponseEvents, llm.new_id(), echo))


def _renamed(error: InvalidRequest) -> InvalidRequest:
    first, *_ = (error.param or "").replace("[", ".").split(".")
    if first not in NAMES or error.param is None:
        return error
    message, param = (text.replace(first, NAMES[first], 1) for text in (error.message, error.param))
    return InvalidRequest(message, param, error.code)


def _echo(body: ResponseBody, parsed: ParsedBody) -> dict[str, Any]:
    """What a response repeats of its request, as it was served.

    Raises:
        InvalidRequest
    """
    tier = body.service_tier or "default"
    echo: dict[str, Any] = {
        "background": False, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None, "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier, "service_tier": TIERS_SERVED.get(tier, tier), "store": False,
        "temperature": parsed.sampling.temperature, "top_p": parsed.sampling.top_p, "top_logprobs": 0,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto", "tools": [], "truncation": "disabled", "user": body.user,
    }  # fmt: skip
    try:
        orjson.dumps(echo)
    except TypeError as error:
        raise InvalidRequest(f"text.format: {error}", "text.format") from None
    return echo
