"""A body of Responses, read as the chat that it asks for."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from pydantic_core import to_json

from services.gateway.admission import tier_served
from services.gateway.apis.openai.schema import given_in
from services.gateway.apis.openai.structure import structure_of
from services.gateway.apis.responses.events import ResponseEvents
from services.gateway.apis.responses.fitting import newest, read_fitting, rendered_fitting
from services.gateway.apis.responses.kept.background import Background
from services.gateway.apis.responses.kept.recalling import Keeping, items_of, recalled
from services.gateway.apis.responses.schema import ResponseBody, read_body, terms_of
from services.gateway.apis.responses.tools import Toolbox, read_toolbox
from services.gateway.apis.responses.turns import messages_of
from services.gateway.bodies import BodyReader, ChatPrompt, Incoming, PromptBounds, Reduced, rendered, small
from services.gateway.chat import ChatRequest, PreparedChat, named_as, prepare
from services.gateway.directory import LLM
from services.gateway.door import CheckTurn, ParsedBody
from services.gateway.errors import InvalidRequest
from services.gateway.generation import read_response_format
from services.gateway.model import template_variables
from services.gateway.tools import ToolUse, read_tools
from services.gateway.untrusted import ChatTemplate, TemplateOptions
from tandem.ids import RandomIds
from tandem.sampling import SamplingParams

# Stands for the items that a helper process removed.
TAKEN = "in the prompt"
# Names of a chat's fields in errors, and what Responses calls them.
OWN = {"messages": "input", ".function.": "."}
NAMES = {"max_tokens": "max_output_tokens"}
# Sampling parameters that are fields of the body's own.
ALSO = frozenset({"temperature", "top_p"})
TEXT = {"type": "text"}


class ResponseReader(BodyReader[ResponseBody]):
    def parse(self, data: bytes) -> ResponseBody:
        return read_body(data)

    def prompts(self, body: ResponseBody, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt:
        with named_as(OWN):
            return _prompt(body, _use(body, read_toolbox(body.tools or (), body.tool_choice)))

    def param(self, body: ResponseBody) -> str:
        return "input"

    def dump(self, body: ResponseBody) -> bytes:
        """Returns the body without its items, sampling parameters included."""
        body.input = TAKEN
        return small(to_json(body.model_dump(exclude_unset=True)), "input")

    def reduce(
        self, data: bytes, bounds: PromptBounds, template: ChatTemplate | None, most: int | None = None
    ) -> Reduced:
        """Returns a large body, reduced. `most`: the bytes of newest items that the prompt may have."""
        body = self.parse(data)
        needed = body.store is not False or body.conversation is not None or body.previous_response_id is not None
        unique = RandomIds()()  # made here, as ids made before the helper's fork would be the same in other forks
        items = items_of(body.input, unique) if needed or body.truncation == "auto" else b"[]"
        body.input = body.input if most is None else newest(body.input, most)

        def render() -> str:
            chat = self.prompts(body, bounds, template)
            with named_as(OWN):
                return rendered(chat, template, bounds)

        text = rendered_fitting(body, render)
        return Reduced(self.dump(body), [text], items)


RESPONSE = ResponseReader()


async def read_response(llm: LLM, body: Incoming[ResponseBody], check_turn: CheckTurn) -> ParsedBody:
    """Raises GatewayError."""
    said = body.body
    whole, keeping = await _with_recalled(llm, body)
    box = read_toolbox(whole.body.tools or (), whole.body.tool_choice)

    async def read(asked: ResponseBody, text: str | None) -> PreparedChat:
        with named_as(OWN):
            return await _prepared(llm, asked, box, text, check_turn)

    chat = await read_fitting(llm, whole, RESPONSE.reduce, read)
    echo = _echo(said, box, chat.sampling) | {"store": keeping is not None and keeping.stores}
    if keeping and keeping.conversation:
        echo["conversation"] = {"id": keeping.conversation}
    return ParsedBody(
        terms=terms_of(said),
        given=chat.given,
        sampling=chat.sampling,
        prompts=[chat.ids],
        param="input",
        operation="chat",
        frame=partial(ResponseEvents, llm.shared.new_id, echo, box.tools, keeping),
        reading=chat.reading,
        detach=Background(llm, keeping.kept, keeping.items).start if said.background and keeping else None,
    )


async def count_input(llm: LLM, body: Incoming[ResponseBody]) -> dict[str, Any]:
    """Returns how many tokens a response to this body would read. Raises GatewayError."""
    whole, _ = await _with_recalled(llm, body)
    with named_as(OWN):
        text = await llm.text_of(whole)
    ids = await llm.encode_chat(text, llm.shared.access.cache_salt(body.owner, ""))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


async def _with_recalled(llm: LLM, body: Incoming[ResponseBody]) -> tuple[Incoming[ResponseBody], Keeping | None]:
    whole, keeping = await recalled(llm, body)
    return body if whole is None else await llm.read(RESPONSE, whole, body.owner), keeping


def _use(body: ResponseBody, box: Toolbox) -> ToolUse | None:
    return read_tools(box.functions, box.choice, body.parallel_tool_calls)


def _prompt(body: ResponseBody, use: ToolUse | None) -> ChatPrompt:
    effort = body.reasoning.effort if body.reasoning else None
    options = TemplateOptions(variables=template_variables(None, effort), tools=use.tools if use else ())
    return ChatPrompt(messages_of(body), options)


async def _prepared(
    llm: LLM, body: ResponseBody, box: Toolbox, text: str | None, check_turn: CheckTurn
) -> PreparedChat:
    """Returns the chat of a body, prepared. `text`: its prompt, if a helper process has rendered it."""
    given = given_in(body, ResponseBody, ALSO)
    if body.max_output_tokens is not None:
        given["max_tokens"] = body.max_output_tokens
    tenant = check_turn(terms := terms_of(body), given.get("max_tokens"))
    use, form = _use(body, box), body.text.format if body.text else None
    chat = ChatRequest(
        prompt=_prompt(body, use) if text is None else text,
        use=use,
        structure=structure_of(body, read_response_format(form, "text.format", "")),
        effort=body.reasoning.effort if body.reasoning else None,
        given=given,
        names={} if body.max_output_tokens is None else NAMES,
        salt=terms.cache_salt,
    )
    return await prepare(llm, chat, tenant)


def _echo(body: ResponseBody, box: Toolbox, sampling: SamplingParams) -> dict[str, Any]:
    """Returns the request's fields that a response repeats, as they were served. Raises InvalidRequest."""
    echo: dict[str, Any] = {
        "background": bool(body.background), "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens, "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id, "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier, "service_tier": tier_served(body.service_tier), "store": False,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_logprobs": 0,
        "text": {"format": _json((body.text and body.text.format) or TEXT, "text.format"), "verbosity": "medium"},
        "tool_choice": _json(body.tool_choice or "auto", "tool_choice"), "tools": _json(box.said, "tools"),
        "truncation": body.truncation or "disabled", "user": body.user,
    }  # fmt: skip
    return echo


def _json(value: Any, param: str) -> orjson.Fragment:
    """Returns a value as JSON, made once for all events.

    Raises:
        InvalidRequest: the value has a number that clients could not read.
    """
    try:
        return orjson.Fragment(orjson.dumps(value))
    except TypeError as error:
        raise InvalidRequest(f"{param}: {error}", param) from None
