"""Anthropic's client-run tools: a body has only their type, so the model is offered these functions.

bash_...            str_replace_based_edit_tool, str_replace_editor (text_editor_...)            memory_...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COMMANDS = ("view", "create", "str_replace", "insert")
TEXT = {"type": "string"}
LINE = {"type": "integer"}


def _one_of(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands)}


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


BASH = (
    "Run a command in a bash session that lasts for the whole conversation, or restart the session.",
    _object({"command": {**TEXT, "description": "the command to run"}, "restart": {"type": "boolean"}}),
)
FILES = {
    "path": {**TEXT, "description": "absolute path of a file or directory"},
    "view_range": {"type": "array", "items": LINE, "description": "the first and last line to view, -1 is the end"},
    "file_text": {**TEXT, "description": "content of the file to create"},
    "old_str": {**TEXT, "description": "text to replace, found exactly once in the file"},
    "new_str": {**TEXT, "description": "text that replaces old_str"},
    "insert_line": {**LINE, "description": "the line behind which text is inserted, 0 is the beginning"},
}
INSERTED = {**TEXT, "description": "text to insert"}
EDITS = "View, create and edit text files."
EDITOR = EDITS, _object({"command": _one_of(*COMMANDS), **FILES, "insert_text": INSERTED}, "command", "path")
# Until 2025-02 edits could be undone, and new_str was the text to insert.
OLD_EDITOR = EDITS, _object({"command": _one_of(*COMMANDS, "undo_edit"), **FILES}, "command", "path")
MEMORY = "Keep files below /memories that last from one conversation to the next.", _object(
    {
        "command": _one_of(*COMMANDS, "delete", "rename"), **FILES, "insert_text": INSERTED,
        "old_path": {**TEXT, "description": "path of the file to rename"},
        "new_path": {**TEXT, "description": "its new path"},
    },
    "command",
)  # fmt: skip
# The first pattern that matches a tool's type counts.
TYPES = (
    (re.compile(r"bash_\d{8}"), BASH),
    (re.compile(r"text_editor_(?:2024\d{4}|20250[12]\d{2}|202503\d{2})"), OLD_EDITOR),
    (re.compile(r"text_editor_\d{8}"), EDITOR),
    (re.compile(r"memory_\d{8}"), MEMORY),
)


def client_tool(kind: str) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the description and input schema of a tool of this type; None if unknown."""
    return next((made for pattern, made in TYPES if pattern.fullmatch(kind)), None)
