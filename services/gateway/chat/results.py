"""The text in results of tools that another server ran, for the model to read.

Other content (pictures, ids, encrypted parts) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = (
    "title", "filename", "url", "code", "text", "stdout", "stderr", "logs", "output", "outputs", "results", "error",
    "error_code", "content", "source",
)  # fmt: skip
MAX_DEPTH = 8


def result_text(tool: str, said: Any) -> str:
    """Returns a result as text of the assistant's message; "" if it has no text."""
    text = text_in(said)
    return f"[result of {tool}]\n{text}" if text else ""


def text_in(said: Any, depth: int = 0) -> str:
    """Returns the texts in a result of any form, one a line."""
    if isinstance(said, str):
        return "" if said.startswith("data:") else said
    if depth > MAX_DEPTH or not isinstance(said, list | Mapping):
        return ""
    inner = said if isinstance(said, list) else _values(said)
    return "\n".join(text for one in inner if (text := text_in(one, depth + 1)))


def _values(said: Mapping[str, Any]) -> list[Any]:
    """Returns the values that may be text; `data` only of a source of type text."""
    names = (*FIELDS, "data") if said.get("type") == "text" else FIELDS
    return [said.get(name) for name in names]
