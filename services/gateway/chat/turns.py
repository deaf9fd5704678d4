"""Turns of a conversation as chat templates want them: roles may have to alternate, so neighbours of one role merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Turn:
    """One message for the template. `answers`: the id of the call whose result it is."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    answers: str | None = None

    def join(self, more: Turn) -> None:
        """Add the content of the turn after this one."""
        self.texts += more.texts
        self.thoughts += more.thoughts
        self.calls += more.calls

    def message(self) -> dict[str, Any]:
        """Returns the message that a chat template reads."""
        said: dict[str, Any] = {"role": self.role, "content": "\n".join(self.texts)}
        if self.calls:
            said["tool_calls"] = self.calls
        if self.answers is not None:
            said["tool_call_id"] = self.answers
        if thoughts := "\n".join(self.thoughts):
            said["reasoning_content"] = thoughts
        return said


def call(call_id: str, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a call of a tool as templates want it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class MergedTurns(list[Turn]):
    """The turns of one conversation, in their order."""

    def add(self, turn: Turn, merges: bool = True) -> None:
        """Append a turn, or merge it into the last one of the same role. Results of tools stay apart."""
        if merges and self and self[-1].role == turn.role != "tool":
            self[-1].join(turn)
        else:
            self.append(turn)

    def messages(self) -> list[Mapping[str, Any]]:
        """Returns the messages that a chat template reads."""
        return [turn.message() for turn in self]
