"""POST /v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from services.gateway.bodies import ChatPrompt, Incoming, PromptBounds, truncated
from services.gateway.directory import LLM
from services.gateway.errors import InvalidRequest
from services.gateway.generation import Delta, check_salt, held_to
from services.gateway.http import schema
from services.gateway.http.format import CheckTurn, Format, Made, Name, ParsedBody, namer, structure_of
from services.gateway.http.functions import with_tools
from services.gateway.model import budget_of, template_variables
from services.gateway.text import Tokenizer
from services.gateway.tools import (
    Call,
    CallPart,
    OnlyString,
    ReadingPlan,
    ToolUse,
    plan_reading,
    read_call,
    read_tools,
)
from services.gateway.untrusted import ROLES, ChatTemplate, TemplateOptions
from tandem.v1 import llm_pb2

# What a chat calls sampling parameters.
NAMES = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}

# Text, or parts of text: the template shows which of the two it wants.
Content: TypeAlias = "str | list[Mapping[str, str]]"


class ChatReader(schema.JsonReader[schema.ChatBody]):
    field, taken = "messages", list[schema.ChatMessage]()

    def parse(self, data: bytes) -> schema.ChatBody:
        return schema.read(schema.ChatBody, data)

    def prompts(self, body: schema.ChatBody, bounds: PromptBounds, template: ChatTemplate | None) -> ChatPrompt:
        return chat_in(body, read_tools(body.tools, body.tool_choice, body.parallel_tool_calls))


CHAT = ChatReader()


async def read_chat(llm: LLM, body: Incoming[schema.ChatBody], check_turn: CheckTurn) -> ParsedBody:
    """
    Raises:
        GatewayError
    """
    found, given = body.body, schema.given_in(body.body, schema.ChatBody)
    names = NAMES if found.max_completion_tokens is not None else {"logprobs": NAMES["logprobs"]}
    return await parse_chat(llm, found, given, body.text, check_turn, names=names)


async def parse_chat(
    llm: LLM, found: schema.ChatBody, given: dict[str, Any], prompt: str | None, check_turn: CheckTurn, *,
    clips: bool = False, names: Mapping[str, str] = NAMES,
) -> ParsedBody:  # fmt: skip
    """Parse a chat, whichever protocol said it.

    `prompt` is what a helper has rendered; `clips`: max_tokens may exceed what the context has left; `names`: what the
    protocol calls sampling parameters.

    Raises:
        GatewayError
    """
    given = budget_of(found.reasoning_effort, llm.model) | given
    llm.bounds.check_choices(1, found.n or 1)
    caller = check_turn(found, found.max_completion_tokens or given.get("max_tokens"))
    use = read_tools(found.tools, found.tool_choice, found.parallel_tool_calls)
    if prompt is None:
        prompt = await llm.render_chat(chat_in(found, use))
    reading = plan_reading(llm.model.thoughts, llm.model.calls, use, prompt)
    if (logprobs := _logprobs(found)) is not None:
        given["logprobs"] = logprobs
    if found.max_completion_tokens is not None:
        given["max_tokens"] = found.max_completion_tokens
    structure = held_to(use, structure_of(found), reading, llm.model.tokenizer)
    ids = await llm.encode_chat(prompt, llm.shared.access.cache_salt(caller, check_salt(found.cache_salt or "")))
    if clips and "max_tokens" in given:
        given["max_tokens"] = min(given["max_tokens"], max(1, llm.max_model_len - len(ids)))
    return ParsedBody(
        body=found,
        n=found.n or 1,
        given=given,
        sampling=await llm.sampling(given, names, structure, caller),
        prompts=[truncated(ids, found.truncate_prompt_tokens)],
        param="messages",
        operation="chat",
        with_prompt_logprobs="prompt_logprobs" in given,
        format=_format(llm, found, reading),
        reading=reading,
    )


def _format(llm: LLM, body: schema.ChatBody, reading: ReadingPlan | None) -> ChatFormat:
    return ChatFormat(
        llm.model.tokenizer,
        namer(llm.model.tokenizer, body),
        lambda: reading.call_id(llm.shared.new_id()) if reading else "",
        body.include_reasoning is not False,
        reading.use.custom if reading and reading.use else frozenset(),
    )


class ChatFormat(Format):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_logprobs_in_choice = False

    def __init__(
        self, tokenizer: Tokenizer, name: Name, new_call_id: Callable[[], str], with_reasoning: bool,
        custom: frozenset[str],
    ) -> None:  # fmt: skip
        """`custom`: names of the custom tools."""
        self._tokenizer, self._name = tokenizer, name
        self._new_call_id = new_call_id
        self._with_reasoning = with_reasoning
        self._custom = custom
        self._inputs: dict[tuple[int, int], OnlyString] = {}  # of custom tools' calls, by choice and index
        self._begun: set[int] = set()

    def delta(self, delta: Delta, made: Made) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text, **self._reasoning(delta)}
        if calls := self._call_parts(delta):
            said["tool_calls"] = calls
        if not delta.text and (len(said) > 1 or (delta.finish_reason and delta.choice in self._begun)):
            del said["content"]
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            said = {"role": "assistant", **said}
        return {"delta": said, "logprobs": self._logprobs(delta, made)}

    def choice(self, delta: Delta, made: Made) -> dict[str, Any]:
        calls = [self._whole_call(call) for call in delta.calls]
        text = None if calls and not delta.text else delta.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **self._reasoning(delta)}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(delta, made)}

    def _reasoning(self, delta: Delta) -> dict[str, str]:
        """By its present name and by the one that older clients know."""
        if not delta.reasoning or not self._with_reasoning:
            return {}
        return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}

    def _whole_call(self, call: Call) -> dict[str, Any]:
        if call.name not in self._custom:
            return self._call(call, "function")
        return self._call(replace(call, arguments=OnlyString().feed(call.arguments)), "custom")

    def _call_parts(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        for part in delta.call_parts:
            key = delta.choice, part.index
            if part.name in self._custom:
                self._inputs[key] = OnlyString()
            kind, arguments = "function", part.arguments
            if (text := self._inputs.get(key)) is not None:
                kind, arguments = "custom", text.feed(arguments)
            if part.name or arguments:
                said = self._call(replace(part, arguments=arguments), kind)
                found.append({"index": part.index, **said})
        return found

    def _call(self, said: Call | CallPart, kind: str) -> dict[str, Any]:
        """Its id and name only where it begins."""
        text = {"input" if kind == "custom" else "arguments": said.arguments}
        if not said.name:
            return {kind: text}
        return {"id": self._new_call_id(), "type": kind, kind: {"name": said.name, **text}}

    def logprobs(self, delta: Delta) -> Made:
        """Logprobs of shown tokens: the one that ends an answer is none of its content."""
        if not delta.tokens.logprobs:
            return {}
        shown = delta.tokens.logprobs[:-1] if delta.ends_silently else delta.tokens.logprobs
        return {"content": map(self._entries, shown)}

    def _logprobs(self, delta: Delta, made: Made) -> dict[str, Any] | None:
        lists = self.logprobs(delta)
        return {"content": made.get("content") or list(lists["content"]), "refusal": None} if lists else None

    def _entries(self, one: llm_pb2.TokenLogprobs) -> dict[str, Any]:
        """A token, and the likeliest in its place."""
        likeliest = [self._entry(top.token_id, top.logprob) for top in one.top]
        return {**self._entry(one.token_id, one.logprob), "top_logprobs": likeliest}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self._name(token_id), "logprob": logprob, "bytes": list(data)}


def chat_in(body: schema.ChatBody | schema.TokenizeBody, use: ToolUse | None) -> ChatPrompt:
    """
    Raises:
        InvalidRequest
    """
    opened = body.add_generation_prompt
    options = TemplateOptions(
        add_generation_prompt=not body.continue_final_message if opened is None else opened,
        continue_final_message=bool(body.continue_final_message),
        variables=template_variables(body.chat_template_kwargs, body.reasoning_effort),
        tools=use.tools if use else (),
    )
    return ChatPrompt(read_messages(body.messages or ()), options)


def read_messages(said: Sequence[schema.ChatMessage]) -> list[Mapping[str, Any]]:
    """
    Raises:
        InvalidRequest
    """
    if not said:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(with_tools(said))]


def _logprobs(body: schema.ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _message(message: schema.ChatMessage, param: str) -> Mapping[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        allowed = ", ".join(ROLES)
        raise InvalidRequest(f"{param}.role must be one of {allowed}, got {message.role!r}", f"{param}.role")
    if role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{param}.tool_call_id is required of a tool", f"{param}.tool_call_id")
    said: dict[str, Any] = {"role": role, "content": _said(message, role, param)}
    if message.tool_calls and message.role == "assistant":
        said["tool_calls"] = [read_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    given["reasoning_content"] = message.reasoning or message.reasoning_content
    return said | {name: value for name, value in given.items() if value is not None}


def _said(message: schema.ChatMessage, role: str, param: str) -> Content:
    """An assistant may have refused, beside its content or in a part of it, or have spoken, or have said nothing."""
    if role == "assistant" and message.content in (None, []):
        return message.refusal or _spoken(message.audio)
    return _content(message.content, f"{param}.content", role == "assistant")


def _spoken(audio: Any) -> str:
    """The text of what was spoken, which its server may know by an id alone."""
    text = audio.get("transcript") if isinstance(audio, Mapping) else None
    return text if isinstance(text, str) else ""


def _content(content: Any, param: str, is_answer: bool) -> Content:
    """`is_answer`: it may have refusals, and parts that another server's model has made, which are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{param} must be a string or a list of text parts", param)
    parts = [_part(part, f"{param}[{i}]", is_answer) for i, part in enumerate(content)]
    return [{"type": "text", "text": part} for part in parts if part is not None] or ""


def _part(part: Any, param: str, is_answer: bool) -> str | None:
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise InvalidRequest(f"{param} must be an object with a type", param)
    if kind != "text" and not (is_answer and kind == "refusal"):
        if is_answer:
            return None
        raise InvalidRequest(f"{param}.type: only text is supported, got {kind!r}", f"{param}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.{kind} must be a string", f"{param}.{kind}")
    return text
