"""Closes objects: a schema with `properties` and without `additionalProperties` then allows only the named properties.

A model that may add properties of its own adds them until max_tokens. OpenAI's strict mode and xgrammar close objects
for the same reason. If several schemas apply to one object (`allOf`, or `$ref` beside `properties`), each of them
names only a part of its properties, so these objects and all within them stay open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.grammar.depth import target_of

NAMED = ("properties", "patternProperties")
ONE = ("items", "additionalProperties")
SEVERAL = ("prefixItems", "allOf", "anyOf", "oneOf")
# An object whose schema has one of these keywords has, or may need, other properties than `properties`.
OPEN = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "if",
     "dependentSchemas", "dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef")
)  # fmt: skip
# A branch that is a schema of only these keywords names no property.
NAMELESS = frozenset(("required", "type", "title", "description"))


def closed(schema: Any) -> Any:
    """Returns a copy of a schema, which is not nested deeply, with its objects closed."""
    return _copied(schema, _closable(schema))


def _closable(schema: Any) -> set[int]:
    """Returns the ids (id()) of the parts to close."""
    found: set[int] = set()
    open_parts: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    waiting = [(schema, False)]
    while waiting:
        part, shared = waiting.pop()
        if not isinstance(part, Mapping) or (id(part), shared) in seen:
            continue
        seen.add((id(part), shared))
        shared = shared or _num_sources(part) > 1
        if shared:
            open_parts.add(id(part))
        elif _may_close(part):
            found.add(id(part))
        waiting += [(inner, shared) for inner in (*_inside(part), target_of(schema, part))]
    return found - open_parts


def _num_sources(part: Mapping[str, Any]) -> int:
    """Returns the number of schemas that name properties of the object that this part describes."""
    names = part.get("properties")
    own = isinstance(names, Mapping)
    branches = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]
    several = [one for one in branches if not (own and all(_names_none(branch, names) for branch in one))]
    in_all = part.get("allOf")
    return own + ("$ref" in part) + len(several) + (len(in_all) if isinstance(in_all, list) else 0)


def _names_none(branch: Any, names: Any) -> bool:
    """True if a branch only requires some of these properties."""
    return isinstance(branch, Mapping) and branch.keys() <= NAMELESS and _requires_only(branch, names)


def _may_close(part: Mapping[str, Any]) -> bool:
    names = part.get("properties")
    return isinstance(names, Mapping) and not part.keys() & OPEN and _requires_only(part, names)


def _requires_only(part: Mapping[str, Any], names: Any) -> bool:
    required = part.get("required", [])
    return isinstance(required, list) and all(isinstance(name, str) and name in names for name in required)


def _inside(part: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the schemas within a schema, without following references."""
    for key in NAMED:
        if isinstance(named := part.get(key), Mapping):
            yield from named.values()
    for key in ONE:
        yield part.get(key)
    for key in SEVERAL:
        if isinstance(several := part.get(key), list):
            yield from several
    if isinstance(items := part.get("items"), list):
        yield from items


def _copied(part: Any, closable: set[int]) -> Any:
    if isinstance(part, list):
        return [_copied(inner, closable) for inner in part]
    if not isinstance(part, Mapping):
        return part
    made = {key: _copied(inner, closable) for key, inner in part.items()}
    return made | {"additionalProperties": False} if id(part) in closable else made
