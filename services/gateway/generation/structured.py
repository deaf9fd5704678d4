"""What an answer must look like, as clients say it, and the grammar that workers hold it to.

response_format       {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs    {"json" | "regex" | "choice" | "grammar" | "json_object" | "structural_tag": ...}
guided_json, guided_regex, guided_choice, guided_grammar      older names of the same
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.text import Tokenizer
from services.gateway.tools import CallReader, ReadingPlan, ToolUse
from tandem import grammar
from tandem.grammar import InvalidGrammar

MAX_LENGTH = 256 * 1024  # of a schema or grammar, in characters
MAX_DEPTH = 64
MAX_CHOICES = 1024
MAX_PLACES = 64  # looked at in search of what is wrong with a schema
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
CALLS = "tools.function.parameters"
NESTED = ("properties", "patternProperties", "$defs", "definitions")
INSIDE = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems")


@dataclass(frozen=True, slots=True)
class Structure:
    kind: str
    value: Any
    param: str  # the client's name of the field
    behind: str | int | None = None  # the text or special token that ends the thoughts before it


async def grammar_for(structure: Structure | None) -> str:
    """Checked; "" where nothing was asked for.

    Raises:
        InvalidRequest: naming the place.
    """
    if structure is None:
        return ""
    return await asyncio.to_thread(grammar_of, structure)


def grammar_of(structure: Structure) -> str:
    """
    Raises:
        InvalidRequest
    """
    value, param = structure.value, structure.param
    if len(value if isinstance(value, str) else json.dumps(value)) > MAX_LENGTH:
        raise InvalidRequest(f"{param} must have at most {MAX_LENGTH} characters", param)
    try:
        made = BUILDERS[structure.kind](value, param)
        if structure.behind is not None:
            made = grammar.behind_thoughts(made, structure.behind)
        grammar.check(made)
    except InvalidGrammar as error:
        place = _place(value, str(error)) if structure.kind == "json" else ""
        raise InvalidRequest(f"{param}{place}: {error}", f"{param}{place}") from None
    return made


def _json(value: Any, param: str) -> str:
    schema = _parsed(value, param)
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON schema, an object", param)
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequest(f"{param} must not be nested deeper than {MAX_DEPTH}", param)
    if (place := _id_beside_ref(schema)) is not None:
        # Drafts up to 7 ignore such an $id. The grammar would follow it.
        raise InvalidRequest(f"{param}{place}: $id beside $ref is not supported", f"{param}{place}")
    return grammar.of_json_schema(schema)


def _regex(value: Any, param: str) -> str:
    return grammar.of_regex(_text(value, param))


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequest(f"{param} must be a list of strings that are not empty", param)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{param} must have at most {MAX_CHOICES} strings, got {len(value)}", param)
    return grammar.of_choice(value)


def _own(value: Any, param: str) -> str:
    return grammar.of_grammar(_text(value, param))


def _json_object(value: Any, param: str) -> str:
    if value is not True:
        raise InvalidRequest(f"{param} must be true", param)
    return grammar.of_json_schema({"type": "object"})


def _structural_tag(value: Any, param: str) -> str:
    said = _parsed(value, param)
    structures = said.get("structures") if isinstance(said, dict) else None
    triggers = said.get("triggers") if isinstance(said, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest(f"{param} must have structures and triggers, two lists", param)
    for i, tag in enumerate(structures):
        if not isinstance(tag, dict) or not all(isinstance(tag.get(key), str) for key in ("begin", "end")):
            raise InvalidRequest(f"{param}.structures[{i}] must have begin, schema and end", f"{param}.structures[{i}]")
        if not isinstance(tag.get("schema"), dict):
            raise InvalidRequest(f"{param}.structures[{i}].schema must be an object", f"{param}.structures[{i}].schema")
    if not all(isinstance(one, str) and one for one in triggers):
        raise InvalidRequest(f"{param}.triggers must be strings that are not empty", f"{param}.triggers")
    return grammar.of_tags(structures, triggers)


def _calls(value: Any, param: str) -> str:
    return grammar.of_calls(value["schemas"], None if value["parallel"] else 1)


BUILDERS = dict(zip(KINDS, (_json, _regex, _choice, _own, _json_object, _structural_tag), strict=True))
BUILDERS["calls"] = _calls


def held_to(
    use: ToolUse | None, said: Structure | None, reading: ReadingPlan | None, tokenizer: Tokenizer
) -> Structure | None:
    """What holds an answer to the calls that must be made, else to what the client said; behind its thoughts."""
    structure = (_of_calls(use) if use else None) or said
    if structure is None and use and reading and reading.calls and use.strict:
        structure = _of_strict(use, reading.calls)
    if structure is None or reading is None or not reading.thoughts_end:
        return structure
    return replace(structure, behind=tokenizer.mark(reading.thoughts_end))


def _of_strict(use: ToolUse, calls: type[CallReader]) -> Structure | None:
    """Free text, and calls whose arguments follow their schemas; None where the format has no place to say so."""
    if calls.strict_tag is None:
        return None
    begin, end = calls.strict_tag
    structures = [
        {
            "begin": begin.format(name=json.dumps(name)),
            "schema": schema if name in use.strict else {"type": "object"},
            "end": end,
        }
        for name, schema in use.schemas.items()
    ]
    return Structure("structural_tag", {"structures": structures, "triggers": [calls.begins[0]]}, CALLS)


def _of_calls(use: ToolUse) -> Structure | None:
    if use.named is not None:
        return Structure("json", use.schemas[use.named], CALLS)
    if use.required:
        return Structure("calls", {"schemas": use.schemas, "parallel": use.parallel}, CALLS)
    return None


def read_structure(said: Mapping[str, Any], param: str) -> Structure:
    """The one kind that an object of `structured_outputs` names.

    Raises:
        InvalidRequest
    """
    kinds = [name for name, value in said.items() if value is not None]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise InvalidRequest(f"{param} must have exactly one of {', '.join(KINDS)}", param)
    return Structure(kinds[0], said[kinds[0]], f"{param}.{kinds[0]}")


def read_response_format(said: Mapping[str, Any]) -> Structure | None:
    """
    Raises:
        InvalidRequest
    """
    param = "response_format"
    match said.get("type"):
        case "text":
            return None
        case "json_object":
            return Structure("json_object", True, param)
        case "json_schema":
            inner = said.get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                raise InvalidRequest(f"{param}.json_schema.schema is required", f"{param}.json_schema.schema")
            return Structure("json", inner["schema"], f"{param}.json_schema.schema")
        case "structural_tag":
            return Structure("structural_tag", said, param)
    raise InvalidRequest(
        f"{param}.type must be text, json_object, json_schema or structural_tag, got {said.get('type')!r}",
        f"{param}.type",
    )


def _parsed(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param) from None


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a string that is not empty", param)
    return value


def _depth(value: Any) -> int:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + max(map(_depth, inside), default=0)


def _id_beside_ref(value: Any, place: str = "") -> str | None:
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str) and isinstance(value.get("$id"), str):
            return place
        inside = [(f"{place}.{key}", part) for key, part in value.items()]
    elif isinstance(value, list):
        inside = [(f"{place}[{i}]", part) for i, part in enumerate(value)]
    return next((found for at, part in inside if (found := _id_beside_ref(part, at)) is not None), None)


def _place(schema: Any, message: str) -> str:
    """Where in a schema the part is that is refused with this message, as a path."""
    found, looked_at = "", 0
    parts = _parts(_parsed(schema, ""))
    while parts and looked_at < MAX_PLACES:
        place, part = parts.pop()
        looked_at += 1
        try:
            grammar.check(grammar.of_json_schema(part))
        except InvalidGrammar as error:
            if str(error) == message:
                found, parts = found + place, _parts(part)
    return found


def _parts(schema: Any) -> list[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return []
    parts = [(f".{key}.{name}", part) for key in NESTED for name, part in (schema.get(key) or {}).items()]
    for key in INSIDE:
        inside = schema.get(key)
        many = enumerate(inside) if isinstance(inside, list) else ()
        parts += [(f".{key}[{i}]", part) for i, part in many] or [(f".{key}", inside)]
    return [(place, part) for place, part in parts if isinstance(part, dict)]
