"""Conversions between LLMService's messages and the gateway's own objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.json_format import MessageToDict

from services.gateway.errors import InvalidRequest
from services.gateway.generation import Answer, Delta, Structure, read_speculative
from services.gateway.model import template_variables
from services.gateway.tools import ToolUse, parsed, read_call, read_tools
from services.gateway.untrusted import ROLES, TemplateOptions
from tandem.speculative import Speculative
from tandem.v1 import llm_pb2

MODES = {
    llm_pb2.ToolChoice.MODE_UNSPECIFIED: "auto",
    llm_pb2.ToolChoice.MODE_NONE: "none",
    llm_pb2.ToolChoice.MODE_REQUIRED: "required",
}


def speculative_of(said: llm_pb2.Speculative) -> Speculative:
    return read_speculative(said.method, said.num_tokens if said.HasField("num_tokens") else None)


def structure_of(said: llm_pb2.StructuredOutputs) -> Structure | None:
    kind = said.WhichOneof("kind")
    if kind is None:
        return None
    value = list(said.choice.texts) if kind == "choice" else getattr(said, kind)
    return Structure(kind, value, f"structured_outputs.{kind}")


def tools_of(request: llm_pb2.GenerateRequest) -> ToolUse | None:
    """Raises InvalidRequest."""
    if not request.tools and not request.HasField("tool_choice"):
        return None
    if request.WhichOneof("input") != "messages":
        raise InvalidRequest("tools are for messages only", "tools")
    choice: Any = MODES.get(request.tool_choice.mode)
    if request.tool_choice.WhichOneof("kind") == "name":
        choice = {"type": "function", "function": {"name": request.tool_choice.name}}
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    use = read_tools([_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)], choice, parallel)
    return use and replace(use, places={name: place.replace(".function", "") for name, place in use.places.items()})


def options_of(said: llm_pb2.ChatMessages, use: ToolUse | None) -> TemplateOptions:
    opened = said.add_generation_prompt if said.HasField("add_generation_prompt") else not said.continue_final_message
    variables = template_variables(MessageToDict(said.chat_template_kwargs), said.reasoning_effort or None)
    return TemplateOptions(opened, said.continue_final_message, variables, use.tools if use else ())


def messages_of(said: llm_pb2.ChatMessages) -> list[Mapping[str, Any]]:
    """Raises InvalidRequest."""
    if not said.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(said.messages)]


def choice_of(answer: Answer, delta: Delta) -> llm_pb2.Choice:
    """Returns a message for one choice's delta."""
    return llm_pb2.Choice(
        index=delta.choice,
        text=delta.text,
        token_ids=delta.tokens.ids,
        logprobs=delta.tokens.logprobs,
        finish_reason=delta.finish_reason,
        prompt_logprobs=delta.tokens.prompt_logprobs,
        reasoning=delta.reasoning,
        tool_calls=calls_of(answer, delta),
    )


def response_of(answer: Answer, delta: Delta) -> llm_pb2.GenerateResponse:
    message = llm_pb2.GenerateResponse(
        request_id=answer.request.request_id,
        model=answer.request.model.name,
        text=delta.text,
        token_ids=delta.tokens.ids,
        logprobs=delta.tokens.logprobs,
        finish_reason=delta.finish_reason,
        index=delta.choice,
        prompt_logprobs=delta.tokens.prompt_logprobs,
        reasoning=delta.reasoning,
        tool_calls=calls_of(answer, delta),
        tool_call_parts=[
            llm_pb2.ToolCallPart(
                index=part.index,
                id=answer.call_id(delta.choice, part.index) if part.name else "",
                name=part.name,
                arguments=part.arguments,
            )
            for part in delta.call_parts
        ],
    )
    if delta.finish_reason:
        message.usage.CopyFrom(answer.usage)
        message.path.CopyFrom(answer.path)
    return message


def calls_of(answer: Answer, delta: Delta) -> list[llm_pb2.ToolCall]:
    return [
        llm_pb2.ToolCall(id=answer.call_id(delta.choice, call.index), name=call.name, arguments=call.arguments)
        for call in delta.calls
    ]


def _message(message: llm_pb2.ChatMessage, param: str) -> Mapping[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(f"{param}.role must be one of {', '.join(ROLES)}, got {message.role!r}", f"{param}.role")
    said: dict[str, Any] = {"role": ROLES[message.role], "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    return said | {name: value for name, value in given.items() if value}


def _call(call: llm_pb2.ToolCall, param: str) -> Mapping[str, Any]:
    return read_call({"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}, param)


def _tool(tool: llm_pb2.Tool, param: str) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters:
        function["parameters"] = parsed(tool.parameters)
        if not isinstance(function["parameters"], dict):
            raise InvalidRequest(f"{param}.parameters must be a JSON schema, as JSON", f"{param}.parameters")
    return {"type": "function", "function": function}
