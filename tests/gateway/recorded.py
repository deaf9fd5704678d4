"""Requests that agents have sent, with all that they say replaced by filler of the same shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CODEX = Path(__file__).parent / "codex_bodies.json"
KEPT = 32  # characters; longer texts, and all that have several words, are said in other words
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SENSITIVE = ("client_metadata", "prompt_cache_key")
# Fields whose text is the agent's own business, however short.
SAID = frozenset({"text", "description", "output"})


def codex_bodies() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(CODEX.read_text(encoding="utf-8"))
    return found


def trimmed(said: Any, key: str = "") -> Any:
    """The same shape: fields, types, names, order; none of its sentences."""
    if isinstance(said, dict):
        return {name: trimmed(value, name) for name, value in said.items() if name not in SENSITIVE}
    if isinstance(said, list):
        return [trimmed(value, key) for value in said]
    if isinstance(said, str) and key == "id":
        return said.partition("_")[0] + "_1"
    if isinstance(said, str) and (key in SAID or (len(said) > KEPT and key != "arguments")):
        return " ".join(WORDS[: min(len(WORDS), max(1, len(said) // 40))])
    return said


def shape(said: Any) -> Any:
    """Its fields and their types."""
    if isinstance(said, dict):
        return {name: shape(value) for name, value in said.items() if name not in SENSITIVE}
    if isinstance(said, list):
        return [shape(value) for value in said]
    return type(said).__name__
