"""Content of messages, where APIs let it be a text or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import InvalidRequest


def text_parts(content: Any, param: str, kinds: Mapping[str, str], is_answer: bool = False) -> list[str]:
    """Returns the texts of a list of parts.

    Args:
        kinds: the field that has the text, by the part's type.
        is_answer: another server's model may have made the content, so parts of other types are left out.

    Raises:
        InvalidRequest: naming the part that is no text.
    """
    found = [_part(part, f"{param}[{i}]", kinds, is_answer) for i, part in enumerate(content)]
    return [text for text in found if text is not None]


def _part(part: Any, param: str, kinds: Mapping[str, str], is_answer: bool) -> str | None:
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        raise InvalidRequest(f"{param} must be an object with a type", param)
    if kind not in kinds:
        if is_answer:
            return None
        raise InvalidRequest(f"{param}.type must be {' or '.join(kinds)}, got {kind!r}", f"{param}.type")
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.{kinds[kind]} must be a string", f"{param}.{kinds[kind]}")
    return text
