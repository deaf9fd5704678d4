"""The form of an answer as clients ask for it: read here, checked in the helper process (grammars.py).

response_format       {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs    {"json" | "regex" | "choice" | "grammar" | "json_object" | "structural_tag": ...}
guided_json, guided_regex, guided_choice, guided_grammar      older names of the same
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.text import Tokenizer
from services.gateway.tools import CallFormat, ReadingPlan, Schemas, ToolUse
from tandem.grammar import KINDS, Behind


@dataclass(frozen=True, slots=True)
class Structure:
    kind: str
    value: Any
    param: str  # the field, by the client's name
    behind: Behind = None  # the mark that ends thoughts before it


def held_to(
    use: ToolUse | None, said: Structure | None, reading: ReadingPlan | None, tokenizer: Tokenizer
) -> Structure | None:
    """Returns the structure of an answer after its thoughts: required calls, else what the client asked for."""
    if reading and reading.calls and reading.calls.messages:
        marks = reading.calls.messages
        if marks["message"] in reading.written:  # the prompt ends within an answer already
            return said
        return _in_messages(use, said, {name: tokenizer.mark(mark) for name, mark in marks.items()})
    structure = (_of_calls(use) if use else None) or said
    if structure is None and use and reading and reading.calls and use.strict:
        structure = _of_strict(use, reading.calls)
    if structure is None or reading is None or not reading.thoughts_end:
        return structure
    return replace(structure, behind=tokenizer.mark(reading.thoughts_end))


def _in_messages(use: ToolUse | None, said: Structure | None, marks: Mapping[str, str | int]) -> Structure | None:
    """Returns the structure in formats with messages, whose answers end with their first call."""
    if use and (use.required or use.named is not None):
        return _called("channel_call", use, use.schemas, marks=marks)
    return replace(said, behind=marks) if said else None


def _of_strict(use: ToolUse, calls: type[CallFormat]) -> Structure | None:
    """Returns free text with calls whose arguments follow their schemas; None if the format cannot express that."""
    if calls.strict_tag is None:
        return None
    held = {name: schema if name in use.strict else {"type": "object"} for name, schema in use.schemas.items()}
    return _called("tagged_calls", use, held, tag=calls.strict_tag, trigger=calls.begins[0])


def _of_calls(use: ToolUse) -> Structure | None:
    if use.named is not None:
        return _called("call", use, use.schemas)
    return _called("calls", use, use.schemas, parallel=use.parallel) if use.required else None


def _called(kind: str, use: ToolUse, schemas: Schemas, **more: Any) -> Structure:
    tools = {
        name: {
            "schema": schema,
            "strict": name in use.strict,
            "place": use.places[name],
            "inside": name not in use.custom,
        }
        for name, schema in schemas.items()
    }
    return Structure(kind, {"tools": tools, **more}, "tools")


def read_structure(said: Mapping[str, Any], param: str) -> Structure:
    """Returns the one structure that an object of `structured_outputs` names. Raises InvalidRequest."""
    kinds = [name for name, value in said.items() if value is not None]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise InvalidRequest(f"{param} must have exactly one of {', '.join(KINDS)}", param)
    return Structure(kinds[0], said[kinds[0]], f"{param}.{kinds[0]}")


def read_response_format(
    said: Mapping[str, Any] | None, param: str = "response_format", inner: str = ".json_schema"
) -> Structure | None:
    """Returns the form that OpenAI's field of this name asks for; None where any text will do.

    Args:
        inner: where a schema lies within the field: in an object of its own, or, "", beside `type`.

    Raises:
        InvalidRequest
    """
    match said.get("type") if said is not None else "text":
        case "text":
            return None
        case "json_object":
            return Structure("json_object", True, param)
        case "structural_tag":
            return Structure("structural_tag", said, param)
        case "json_schema":
            found, where = said and (said.get(inner[1:]) if inner else said), f"{param}{inner}.schema"
            if not isinstance(found, Mapping) or "schema" not in found:
                raise InvalidRequest(f"{where} is required", where)
            return Structure("json", found["schema"], where)
        case kind:
            allowed = "text, json_object, json_schema or structural_tag"
            raise InvalidRequest(f"{param}.type must be {allowed}, got {kind!r}", f"{param}.type")
