"""Items that OpenAI's server made, in a conversation that began there, as the model sees them.

calls that a client has run, their outputs     calls of tools and their results
calls that OpenAI has run                      their outputs, as text of the assistant
others                                         nothing: what they say is for OpenAI's server
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from services.gateway.chat import result_text, text_in

# Calls that the client ran: the tool's name, and the field with its arguments.
RUN = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
}
RESULTS = ("code", "outputs", "output", "results", "error")
OPENAIS = re.compile(r".+_(?:call|output)|mcp_.+|.*compaction.*")


class Messages(Protocol):
    def say(self, role: str, text: str) -> None: ...

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None: ...

    def answer(self, call_id: str, text: str) -> None: ...


def add_foreign(messages: Messages, kind: str, item: Mapping[str, Any]) -> bool:
    """Add the turns of an item. Returns whether it is one of OpenAI's."""
    if kind in RUN:
        name, field = RUN[kind]
        arguments = item.get(field)
        messages.call(_call_id(item), name, arguments if isinstance(arguments, Mapping) else {})
    elif kind.removesuffix("_output") in RUN:
        messages.answer(_call_id(item), text_in(item.get("output")))
    elif text := result_text(kind.removesuffix("_call"), [item.get(name) for name in RESULTS]):
        messages.say("assistant", text)
    return OPENAIS.fullmatch(kind) is not None


def _call_id(item: Mapping[str, Any]) -> str:
    found = item.get("call_id") or item.get("id")
    return found if isinstance(found, str) else ""
