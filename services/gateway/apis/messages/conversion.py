"""A Messages body as the chat that the pipeline takes.

thinking        off unless asked for: the template gets `enable_thinking` and `thinking`, and a model whose
                template reads neither gets a budget of 0
output_config   `effort` is a chat's effort where the model thinks, `format` the form of its answer
"""

from __future__ import annotations

from services.gateway.apis.messages.offered import functions_of, offered
from services.gateway.apis.messages.schema import CountTokensBody
from services.gateway.apis.messages.turns import turns_of
from services.gateway.bodies import ChatPrompt
from services.gateway.errors import InvalidRequest
from services.gateway.generation import Structure
from services.gateway.model import template_variables
from services.gateway.tools import ToolUse, read_tools
from services.gateway.untrusted import ChatTemplate, TemplateOptions

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def prompt_of(body: CountTokensBody, template: ChatTemplate | None, use: ToolUse | None) -> ChatPrompt:
    """Returns the turns for the template. A last one of the assistant is the beginning of the answer.

    Raises InvalidRequest.
    """
    turns, thinks = turns_of(body, template), thinks_in(body)
    continues = turns[-1].role == "assistant"
    variables = template_variables({"enable_thinking": thinks, "thinking": thinks}, effort_of(body))
    options = TemplateOptions(not continues, continues, variables, use.tools if use else ())
    return ChatPrompt(turns.messages(), options)


def use_of(body: CountTokensBody) -> ToolUse | None:
    """Raises InvalidRequest."""
    functions = functions_of(offered(body))
    if (choice := body.tool_choice) is None:
        return read_tools(functions, None, None)
    named = {"type": "function", "function": {"name": choice.name}}
    return read_tools(functions, CHOICES.get(choice.type, named), not choice.disable_parallel_tool_use)


def thinks_in(body: CountTokensBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def effort_of(body: CountTokensBody) -> str | None:
    """Returns the effort to think with; "none" where no thoughts are asked for."""
    if not thinks_in(body):
        return "none"
    return body.output_config.effort if body.output_config else None


def format_of(body: CountTokensBody) -> Structure | None:
    """Returns the form of `output_config.format`, or of `output_format` as an older beta has it.

    Raises InvalidRequest.
    """
    inner = body.output_config.format if body.output_config else None
    said, where = (inner, "output_config.format") if inner is not None else (body.output_format, "output_format")
    if said is None:
        return None
    if said.get("type") != "json_schema":
        raise InvalidRequest(f"{where}.type must be json_schema, got {said.get('type')!r}", f"{where}.type")
    if not isinstance(schema := said.get("schema"), dict):
        raise InvalidRequest(f"{where}.schema must be a JSON schema, an object", f"{where}.schema")
    return Structure("json", schema, f"{where}.schema")
